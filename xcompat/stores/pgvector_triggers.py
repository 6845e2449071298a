"""Triggers that keep two columns of vectors of a PostgreSQL table consistent while services write."""

from __future__ import annotations

from psycopg import sql

from xcompat.stores.pgvector_client import Client

TRIGGERS = ("~xcompat_follows", "~xcompat_receives", "~xcompat_requires")
"""Names of the triggers. PostgreSQL runs triggers in the order of their names: these come last."""
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
"""What each does, on which statements, and when. The first is not ``UPDATE OF``, which is blind to a vector that another trigger
computes; a row that has nothing to lose comes first, so filling compares no vectors, which would read them once more."""
_FUNCTION = "CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
_TRIGGER = "CREATE TRIGGER {trigger} BEFORE "
_FOUND = (
    "SELECT format('%%I', tgname), tgfoid, tgfoid::regprocedure::text FROM pg_trigger "
    "WHERE tgrelid = to_regclass(%s) AND tgname = ANY(%s::name[])"
)


def follow(
    client: Client, schema: str, table: sql.SQL, space: str, old: str, receive: bool = False, require: bool = False
) -> None:
    """Empty a space of each row whose vector changes in the one that is searched: there it is of what was before.

    Args:
        client: the connection that writes.
        schema: of the table.
        table: its name, with the schema.
        space: the column that loses its vector.
        old: the column that is searched.
        receive: move vectors that statements without a column list put into the other column.
        require: refuse rows that lose the searched vector, or come without one.
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
    """Undo :func:`follow`."""
    found = client.execute(_FOUND, table.as_string(client.connection), [*TRIGGERS])
    for trigger, number, function in found:
        client.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.SQL(trigger), table))
        if not client.execute("SELECT FROM pg_trigger WHERE tgfoid = %s", number):  # else another table has it too
            client.execute(sql.SQL("DROP FUNCTION {}").format(sql.SQL(function)))
