"""Triggers to keep two vector columns consistent during writes."""

from __future__ import annotations

from psycopg import sql

from xcompat.stores.pgvector_client import Client

TRIGGERS = ("~xcompat_follows", "~xcompat_receives", "~xcompat_requires")
"""Trigger names. PostgreSQL runs triggers in the order of their names, so these come last."""
_EMPTY = "NEW.{new} := NULL;"
_MOVE = "NEW.{old} := NEW.{new}; NEW.{new} := NULL;"
_REFUSE = """IF TG_OP = 'INSERT' OR OLD.{old} IS NOT NULL THEN
  RAISE not_null_violation USING MESSAGE = format('null value in column %%I violates not-null constraint', {name}); END IF;"""
_BODIES = dict(
    zip(
        TRIGGERS,
        (
            (_EMPTY, "UPDATE", "OLD.{new} IS NOT NULL AND OLD.{old} IS DISTINCT FROM NEW.{old}"),
            (_MOVE, "INSERT", "NEW.{old} IS NULL AND NEW.{new} IS NOT NULL"),
            (_REFUSE, "INSERT OR UPDATE", "NEW.{old} IS NULL"),
        ),
        strict=True,
    )
)
"""Action, statement and condition of each trigger. The first is not ``UPDATE OF``, which misses vectors that other triggers
compute. It checks for NULL first, so that filling does not read and compare vectors.
"""
_FUNCTION = "CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
_TRIGGER = "CREATE TRIGGER {trigger} BEFORE "
_FOUND = (
    "SELECT format('%%I', tgname), tgfoid, tgfoid::regprocedure::text FROM pg_trigger "
    "WHERE tgrelid = to_regclass(%s) AND tgname = ANY(%s::name[])"
)


def follow(
    client: Client, schema: str, table: sql.SQL, space: str, old: str, receive: bool = False, require: bool = False
) -> None:
    """Create triggers to clear a space's vector when the row's searched vector changes.

    Args:
        client: connection for writes.
        schema: the table's schema.
        table: name with the schema.
        space: column to clear.
        old: searched column.
        receive: move vectors that INSERT without a column list puts into the other column.
        require: reject rows that lose the searched vector or arrive without it.
    """
    number = client.execute("SELECT to_regclass(%s)::oid", table.as_string(client.connection))[0][0]
    for trigger, wanted in zip(TRIGGERS, (True, receive, require), strict=True):
        if not wanted:
            continue
        body, event, condition = _BODIES[trigger]
        names = {
            "function": sql.Identifier(schema, f"xcompat_{number}_{trigger.rpartition('_')[2]}"),
            "trigger": sql.Identifier(trigger),
            "table": table,
            "new": sql.Identifier(space),
            "old": sql.Identifier(old),
            "name": sql.Literal(old),
        }
        for statement in (
            _FUNCTION + body + " RETURN NEW; END $$",
            _TRIGGER + event + " ON {table} FOR EACH ROW WHEN (" + condition + ") EXECUTE FUNCTION {function}()",
        ):
            client.execute(sql.SQL(statement).format(**names))


def unfollow(client: Client, table: sql.SQL) -> None:
    """Drop the triggers."""
    found = client.execute(_FOUND, table.as_string(client.connection), [*TRIGGERS])
    for trigger, number, function in found:
        client.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.SQL(trigger), table))
        if not client.execute("SELECT FROM pg_trigger WHERE tgfoid = %s", number):  # else another table uses it
            client.execute(sql.SQL("DROP FUNCTION {}").format(sql.SQL(function)))
