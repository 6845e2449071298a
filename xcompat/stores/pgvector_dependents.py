"""SQL to drop and recreate a column's dependents: views, rules, triggers and others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, LiteralString, NamedTuple

from psycopg import sql

from xcompat.stores.pgvector_client import Client
from xcompat.stores.pgvector_triggers import TRIGGERS

NOT_NULL = "xcompat_not_null"
"""Name of the temporary constraint in place of NOT NULL, until the rows are checked."""


class Column(NamedTuple):
    """Column in a table or partition.

    Args:
        relation: the relation's OID.
        number: attribute number.
        table: relation as SQL.
        name: column as SQL.
    """

    relation: int
    number: int
    table: str
    name: str


@dataclass(frozen=True)
class Dependent:
    """Object that depends on a column.

    Args:
        name: name for messages, e.g. ``view shop.cheap``.
        drop: statement to drop it. Empty if recreating replaces it.
        create: statements to recreate it, with owner, privileges and comment.
        validate: statements to run later, without blocking others.
        lock: statement to lock it. Empty if it cannot be read.
        obstacle: reason why it cannot be recreated.
        note: cost to recreate it.
    """

    name: str
    drop: str = ""
    create: tuple[str, ...] = ()
    validate: tuple[str, ...] = ()
    lock: str = ""
    obstacle: str = ""
    note: str = ""


class Resize(NamedTuple):
    """Old and new dimension, to adjust casts like ``::halfvec(384)``."""

    old: int | None
    new: int | None

    def __call__(self, text: str) -> str:
        """Adjust casts to the old dimension in SQL."""
        if self.old is None or self.new is None:
            return text
        return re.sub(rf"\b(vector|halfvec|sparsevec|bit)\({self.old}\)", rf"\1({self.new})", text)


def find_columns(client: Client, table: sql.SQL, name: str) -> list[Column]:
    """Return a column in a table and its partitions, parents first."""
    found = client.ask(_COLUMNS, table.as_string(client.connection), name)
    return [Column(*row) for row in found]


_COLUMNS = """
WITH RECURSIVE tree AS (
  SELECT to_regclass(%s)::oid AS oid, 0 AS level
  UNION ALL SELECT inhrelid, level + 1 FROM pg_inherits JOIN tree ON inhparent = tree.oid)
SELECT attrelid::int8, attnum, format('%%I.%%I', nspname, relname), quote_ident(attname)
FROM tree JOIN pg_class c USING (oid) JOIN pg_namespace n ON n.oid = relnamespace JOIN pg_attribute ON attrelid = c.oid
WHERE attname = %s AND NOT attisdropped ORDER BY level, c.oid
"""


def find_dependents(client: Client, columns: list[Column], resize: Resize) -> list[Dependent]:
    """Return a column's dependents, in the order to drop them. Indexes are excluded.

    Args:
        client: connection for writes.
        columns: columns from :func:`find_columns`.
        resize: adjusts casts to the column's dimension.
    """
    return _Search(client, columns, resize).run()


class _Search:
    """Search for a column's direct and indirect dependents."""

    def __init__(self, client: Client, columns: list[Column], resize: Resize) -> None:
        self.client, self.columns, self.resize = client, columns, resize
        self.seen: set[tuple[str, int]] = set()
        self.found: list[Dependent] = []

    def run(self) -> list[Dependent]:
        for column in self.columns:
            for kind, number in self._find_bound(column.relation, column.number):
                self._visit(kind, number)
        return self.found

    def _visit(self, kind: str, number: int) -> None:
        """Add an object after its own dependents."""
        if (kind, number) in self.seen:
            return
        self.seen.add((kind, number))
        scripted = getattr(self, f"_{kind}", None)
        dependent = scripted(number) if scripted is not None else self._refuse_object(kind, number)
        if dependent is None:
            return
        for other in self._find_dependents(kind, number):
            self._visit(*other)
        self.found.append(dependent)

    def _find_bound(self, relation: int, column: int) -> Iterator[tuple[str, int]]:
        yield from self._resolve_objects(
            _DEPENDS + " AND refobjid = %s AND refobjsubid = %s ORDER BY objid", "pg_class", relation, column
        )

    def _find_dependents(self, kind: str, number: int) -> Iterator[tuple[str, int]]:
        """Return a dropped object's dependents."""
        if kind == "pg_attrdef":
            yield from self._find_bound(*self.client.ask("SELECT adrelid::int8, adnum FROM pg_attrdef WHERE oid = %s", number)[0])
        if kind == "view":
            yield from self._resolve_objects(_ABOVE, "pg_class", number)
            for (row_type,) in self.client.ask(_ROW_TYPES, number, number):
                yield from self._resolve_objects(_ABOVE, "pg_type", row_type)
        if kind == "pg_proc":
            yield from self._resolve_objects(_ABOVE, "pg_proc", number)

    def _resolve_objects(self, asked: LiteralString, *given: Any) -> Iterator[tuple[str, int]]:  # noqa: ANN401
        """Yield objects as kind and OID. Use views in place of their rules."""
        for kind, number in self.client.ask(asked, *given):
            if kind == "pg_rewrite":
                ((view, relkind),) = self.client.ask(_RULED, number)
                yield ("view", view) if relkind in ("v", "m") else (kind, number)
            elif kind != "pg_class":  # indexes have a copy on the other column
                yield kind, number

    def _describe_object(self, kind: str, number: int) -> str:
        catalog = "pg_class" if kind == "view" else kind
        return str(self.client.ask("SELECT pg_describe_object(%s::regclass, %s, 0)", catalog, number)[0][0])

    def _refuse_object(self, kind: str, number: int) -> Dependent:
        return Dependent(name := self._describe_object(kind, number), obstacle=f"{name} uses the column; drop it first")

    def _rows(self, asked: LiteralString, number: int) -> list[Any]:
        return [row[0] for row in self.client.ask(asked, *[number] * len(re.findall("(?<!%)%s", asked))) if row[0] is not None]

    # ------------------------------------------------------------------------------------------------- kinds

    def _view(self, number: int) -> Dependent:
        ((name, stored, options, space, filled, mine, temporary, definition),) = self.client.ask(_VIEW, number)
        kind, described = "MATERIALIZED VIEW" if stored else "VIEW", self._describe_object("view", number)
        if temporary or not mine:
            why = "is temporary" if temporary else "belongs to another role"
            return Dependent(described, obstacle=f"{described} uses the column and {why}; drop it first")
        named = f" WITH ({', '.join(options)})" if options else ""
        placed = f" TABLESPACE {space}" if space else ""
        body = self.resize(definition.rstrip().rstrip(";"))
        filling = ("" if filled else " WITH NO DATA") if stored else ""
        parts = [self.resize(each) for each in self._rows(_VIEW_PARTS, number)]
        return Dependent(
            described,
            f"DROP {kind} {name}",
            (f"CREATE {kind} {name}{named}{placed} AS {body}{filling}", *parts, *self._extras("view", number, kind, name)),
            lock=f"ALTER {kind} {name} OWNER TO {self._owner(number)}"
            if stored
            else f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE",
            note=f"switch computes {described} again while it locks the table" if stored and filled else "",
        )

    def _owner(self, number: int) -> str:
        return str(self.client.ask("SELECT quote_ident(pg_get_userbyid(relowner)) FROM pg_class WHERE oid = %s", number)[0][0])

    def _pg_proc(self, number: int) -> Dependent:
        ((name, kind, definition),) = self.client.ask(_FUNCTION, number)
        described = self._describe_object("pg_proc", number)
        if definition is None:
            return Dependent(described, obstacle=f"{described} uses the column; drop it first")
        create = (self.resize(definition), *self._extras("pg_proc", number, kind, name))
        return Dependent(described, f"DROP {kind} {name}", create)

    def _pg_rewrite(self, number: int) -> Dependent:
        ((name, table, definition, enabled),) = self.client.ask(_RULE, number)
        create = (
            self.resize(definition),
            *_enable_statements(table, "RULE", name, enabled),
            *self._comment("pg_rewrite", number, f"RULE {name} ON {table}"),
        )
        return Dependent(self._describe_object("pg_rewrite", number), f"DROP RULE {name} ON {table}", create)

    def _pg_trigger(self, number: int) -> Dependent | None:
        ((plain, name, table, definition, enabled, parent),) = self.client.ask(_TRIGGER, number)
        if plain in TRIGGERS or parent:  # ours, or inherited from a partitioned table
            return None
        create = (
            self.resize(definition),
            *_enable_statements(table, "TRIGGER", name, enabled),
            *self._comment("pg_trigger", number, f"TRIGGER {name} ON {table}"),
        )
        return Dependent(self._describe_object("pg_trigger", number), f"DROP TRIGGER {name} ON {table}", create)

    def _pg_policy(self, number: int) -> Dependent:
        ((name, table, definition),) = self.client.ask(_POLICY, number)
        create = (self.resize(definition), *self._comment("pg_policy", number, f"POLICY {name} ON {table}"))
        return Dependent(self._describe_object("pg_policy", number), f"DROP POLICY {name} ON {table}", create)

    def _pg_statistic_ext(self, number: int) -> Dependent:
        ((name, definition, target, owner),) = self.client.ask(_STATISTICS, number)
        more = [f"ALTER STATISTICS {name} SET STATISTICS {target}"] if target is not None and target >= 0 else []
        create = (
            self.resize(definition),
            *more,
            f"ALTER STATISTICS {name} OWNER TO {owner}",
            *self._comment("pg_statistic_ext", number, f"STATISTICS {name}"),
        )
        return Dependent(self._describe_object("pg_statistic_ext", number), f"DROP STATISTICS {name}", create)

    def _pg_publication_rel(self, number: int) -> Dependent:
        ((publication, table, columns, where),) = self.client.ask(_PUBLISHED, number)
        rest = (f" ({columns})" if columns else "") + (f" WHERE ({self.resize(where)})" if where else "")
        return Dependent(
            self._describe_object("pg_publication_rel", number),
            f"ALTER PUBLICATION {publication} DROP TABLE {table}",
            (f"ALTER PUBLICATION {publication} ADD TABLE {table}{rest}",),
        )

    def _pg_constraint(self, number: int) -> Dependent | None:
        ((kind, name, table, definition, valid, inherited),) = self.client.ask(_CONSTRAINT, number)
        if kind == "n" or inherited or name == NOT_NULL:  # NOT NULL follows the column; inherited constraints follow the parent
            return None
        described = self._describe_object("pg_constraint", number)
        if kind != "c":
            return Dependent(
                described, obstacle=f"{described} includes the column; replace it with a unique index or drop it first"
            )
        later = (f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}",) if valid else ()
        made = f"ALTER TABLE {table} ADD CONSTRAINT {name} {self.resize(definition)}{' NOT VALID' if valid else ''}"
        create = (made, *self._comment("pg_constraint", number, f"CONSTRAINT {name} ON {table}"))
        return Dependent(described, f"ALTER TABLE {table} DROP CONSTRAINT {name}", create, later)

    def _pg_attrdef(self, number: int) -> Dependent | None:
        ((relation, column, generated, table, name, kind, expression),) = self.client.ask(_GENERATED, number)
        if any(own.relation == relation and own.number == column for own in self.columns):
            return None  # the column's own default
        described = f"generated column {name} of {table}"
        if not generated:
            return Dependent(described, obstacle=f"the default of {name} uses the column; drop it first")
        if self.client.connection.info.server_version < _SET_EXPRESSION:
            return Dependent(
                described,
                obstacle=f"{described} is computed from the column, and only PostgreSQL 17 or later can change it; drop it first",
            )
        change = f"ALTER TABLE {table} ALTER COLUMN {name}"
        typed = self.resize(kind)
        steps = () if typed == kind else (f"{change} SET EXPRESSION AS (NULL::{kind})", f"{change} TYPE {typed}")
        note = f"switch computes {described} again and rewrites the table under its lock"
        return Dependent(described, "", (*steps, f"{change} SET EXPRESSION AS ({self.resize(expression)})"), note=note)

    # ------------------------------------------------------------------------------------------------- extras

    def _comment(self, kind: str, number: int, what: str) -> list[str]:
        catalog = "pg_class" if kind == "view" else kind
        found = self.client.ask("SELECT quote_literal(obj_description(%s, %s::name))", number, catalog)[0][0]
        return [f"COMMENT ON {what} IS {found}"] if found else []

    def _extras(self, kind: str, number: int, what: str, name: str) -> list[str]:
        """Return the statements for owner, privileges and comment."""
        asked = _VIEW_PRIVILEGES if kind == "view" else _FUNCTION_PRIVILEGES
        owner, public, grants = self.client.ask(asked, number, number)[0]
        on = name if kind == "view" else f"{what} {name}"
        closed = [f"REVOKE ALL ON {on} FROM PUBLIC"] if not public else []
        granted = [f"GRANT {privilege} ON {on} TO {rest}" for privilege, rest in grants or []]
        return [*closed, *granted, *self._comment(kind, number, f"{what} {name}"), f"ALTER {what} {name} OWNER TO {owner}"]


def _enable_statements(table: str, what: str, name: str, state: str) -> list[str]:
    how = {"D": "DISABLE", "R": "ENABLE REPLICA", "A": "ENABLE ALWAYS"}.get(state)
    return [f"ALTER TABLE {table} {how} {what} {name}"] if how else []


_SET_EXPRESSION = 170_000
"""First server version that can change a generated column."""
_DEPENDS: LiteralString = """
SELECT DISTINCT ON (objid) classid::regclass::text, objid::int8 FROM pg_depend WHERE refclassid = %s::regclass AND objsubid = 0
"""
_ABOVE = _DEPENDS + " AND refobjid = %s AND deptype = 'n' ORDER BY objid"
_ROW_TYPES = "SELECT oid::int8 FROM pg_type WHERE typrelid = %s OR typelem = (SELECT oid FROM pg_type WHERE typrelid = %s)"
_RULED = "SELECT ev_class::int8, relkind FROM pg_rewrite r JOIN pg_class c ON c.oid = ev_class WHERE r.oid = %s"
_VIEW = """
SELECT format('%%I.%%I', nspname, relname), relkind = 'm', reloptions, quote_ident(spcname), relispopulated,
  pg_has_role(relowner, 'USAGE'), relpersistence = 't', pg_get_viewdef(c.oid)
FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace LEFT JOIN pg_tablespace s ON s.oid = reltablespace WHERE c.oid = %s
"""
_VIEW_PARTS = """
SELECT format('ALTER VIEW %%s ALTER COLUMN %%I SET DEFAULT %%s', adrelid::regclass, attname, pg_get_expr(adbin, adrelid))
FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum WHERE adrelid = %s
UNION ALL SELECT format('COMMENT ON COLUMN %%s.%%I IS %%L', attrelid::regclass, attname, col_description(attrelid, attnum))
FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND col_description(attrelid, attnum) IS NOT NULL
UNION ALL SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = %s
UNION ALL SELECT format('COMMENT ON INDEX %%s IS %%L', indexrelid::regclass, obj_description(indexrelid, 'pg_class'))
FROM pg_index WHERE indrelid = %s AND obj_description(indexrelid, 'pg_class') IS NOT NULL
UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = %s AND NOT tgisinternal
UNION ALL SELECT pg_get_ruledef(oid) FROM pg_rewrite WHERE ev_class = %s AND rulename <> '_RETURN'
UNION ALL SELECT format('GRANT %%s (%%I) ON %%s TO %%s%%s', a.privilege_type, attname, attrelid::regclass,
  CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
  CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
FROM pg_attribute, aclexplode(attacl) a WHERE attrelid = %s
"""
_PRIVILEGES: LiteralString = """
SELECT quote_ident(pg_get_userbyid({owner})), {acl} IS NULL OR EXISTS (SELECT FROM aclexplode({acl}) a WHERE grantee = 0), (
  SELECT json_agg(json_build_array(privilege_type,
    CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END
    || CASE WHEN is_grantable THEN ' WITH GRANT OPTION' ELSE '' END))
  FROM {catalog} p, aclexplode(p.{acl}) a WHERE p.oid = %s AND grantee <> p.{owner})
FROM {catalog} WHERE oid = %s
"""
_VIEW_PRIVILEGES = _PRIVILEGES.replace("{owner}", "relowner").replace("{acl}", "relacl").replace("{catalog}", "pg_class")
_FUNCTION_PRIVILEGES = _PRIVILEGES.replace("{owner}", "proowner").replace("{acl}", "proacl").replace("{catalog}", "pg_proc")
_FUNCTION = """
SELECT oid::regprocedure::text, CASE prokind WHEN 'p' THEN 'PROCEDURE' ELSE 'FUNCTION' END,
  CASE WHEN prokind <> 'a' AND pg_has_role(proowner, 'USAGE') THEN pg_get_functiondef(oid) END FROM pg_proc WHERE oid = %s
"""
_RULE = "SELECT quote_ident(rulename), ev_class::regclass::text, pg_get_ruledef(oid), ev_enabled FROM pg_rewrite WHERE oid = %s"
_TRIGGER = """
SELECT tgname, quote_ident(tgname), tgrelid::regclass::text, pg_get_triggerdef(oid), tgenabled, tgparentid <> 0
FROM pg_trigger WHERE oid = %s
"""
_POLICY = """
SELECT quote_ident(polname), polrelid::regclass::text, format('CREATE POLICY %%I ON %%s AS %%s FOR %%s TO %%s', polname,
  polrelid::regclass, CASE WHEN polpermissive THEN 'PERMISSIVE' ELSE 'RESTRICTIVE' END,
  CASE polcmd WHEN 'r' THEN 'SELECT' WHEN 'a' THEN 'INSERT' WHEN 'w' THEN 'UPDATE' WHEN 'd' THEN 'DELETE' ELSE 'ALL' END,
  (SELECT string_agg(CASE r WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(r)) END, ', ') FROM unnest(polroles) r))
  || coalesce(' USING (' || pg_get_expr(polqual, polrelid) || ')', '')
  || coalesce(' WITH CHECK (' || pg_get_expr(polwithcheck, polrelid) || ')', '')
FROM pg_policy WHERE oid = %s
"""
_STATISTICS = """
SELECT format('%%I.%%I', nspname, stxname), pg_get_statisticsobjdef(s.oid), stxstattarget, quote_ident(pg_get_userbyid(stxowner))
FROM pg_statistic_ext s JOIN pg_namespace n ON n.oid = stxnamespace WHERE s.oid = %s
"""
_PUBLISHED = """
SELECT quote_ident(pubname), prrelid::regclass::text, (SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum)
  FROM pg_attribute WHERE attrelid = prrelid AND attnum = ANY(prattrs)), pg_get_expr(prqual, prrelid)
FROM pg_publication_rel r JOIN pg_publication p ON p.oid = prpubid WHERE r.oid = %s
"""
_CONSTRAINT = """
SELECT contype, quote_ident(conname), conrelid::regclass::text, pg_get_constraintdef(oid), convalidated, coninhcount > 0
FROM pg_constraint WHERE oid = %s
"""
_GENERATED = """
SELECT adrelid::int8, adnum, attgenerated <> '', adrelid::regclass::text, quote_ident(attname),
  format_type(atttypid, atttypmod), pg_get_expr(adbin, adrelid)
FROM pg_attrdef d JOIN pg_attribute a ON attrelid = adrelid AND attnum = adnum WHERE d.oid = %s
"""
