"""The trigger by which a space of a PostgreSQL table loses the vector of each row that changes in the searched one."""

from __future__ import annotations

from psycopg import sql

from xcompat.stores.pgvector_client import Client

TRIGGER = "~xcompat_follows"
"""Name of the trigger, of which a table has one at most. Triggers run in the order of their names: this one comes last."""
EARLIER = "xcompat_{}_follows"
"""What earlier versions called it, and its function too, by the space: tables of one schema may share that function."""
_FUNCTION = """
CREATE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.{new} := NULL; RETURN NEW; END $$
"""
_TRIGGER = """
CREATE TRIGGER {trigger} BEFORE UPDATE ON {table} FOR EACH ROW
WHEN (OLD.{new} IS NOT NULL AND OLD.{old} IS DISTINCT FROM NEW.{old}) EXECUTE FUNCTION {function}()
"""
"""Not ``UPDATE OF``, which is blind to a vector that another trigger computes. A row that has nothing to lose comes first: so
filling compares no vectors, which would read them once more."""
_FOUND = (
    "SELECT format('%%I', tgname), tgfoid, tgfoid::regprocedure::text FROM pg_trigger "
    "WHERE tgrelid = to_regclass(%s) AND tgname IN (%s::name, %s::name)"
)


def follow(client: Client, schema: str, table: sql.SQL, space: str, old: str) -> None:
    """Empty a space of each row whose vector changes in the one that is searched: there it is of what was before.

    Args:
        client: the connection that writes.
        schema: of the table.
        table: its name, with the schema.
        space: the column that loses its vector.
        old: the column that is searched.
    """
    number = client.execute("SELECT to_regclass(%s)::oid", table.as_string(client.connection))[0][0]
    names = {"function": sql.Identifier(schema, f"xcompat_{number}_follows"), "trigger": sql.Identifier(TRIGGER)}
    for statement in (_FUNCTION, _TRIGGER):
        client.execute(sql.SQL(statement).format(table=table, new=sql.Identifier(space), old=sql.Identifier(old), **names))


def unfollow(client: Client, table: sql.SQL, space: str) -> None:
    """Undo :func:`follow`; what an earlier version made is found by what it called it."""
    found = client.execute(_FOUND, table.as_string(client.connection), TRIGGER, EARLIER.format(space))
    for trigger, number, function in found:
        client.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.SQL(trigger), table))
        if not client.execute("SELECT FROM pg_trigger WHERE tgfoid = %s", number):  # else another table has it too
            client.execute(sql.SQL("DROP FUNCTION {}").format(sql.SQL(function)))
