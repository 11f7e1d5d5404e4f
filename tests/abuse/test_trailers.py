"""Header lines and extensions inside a chunked body: as bounded as the head's own."""

from tests.abuse.support import FAST, gateway, head, ledger, raw, story


def chat(world, text="hi"):
    return (
        b'{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"%b"}]}' % text.encode()
    )


@story
async def test_a_trailer_within_the_limits_is_dropped_and_the_connection_lives_on():
    async with gateway(FAST) as world, ledger(world):
        async with raw(world) as client:
            body = chat(world)
            for _ in range(2):
                await client.send(
                    head(key=world.key, chunked=True)
                    + b"%x;ext=1\r\n%b\r\n0\r\nx-checksum: abc\r\nauthorization: Bearer no\r\n\r\n"
                    % (len(body), body)
                )
                assert (await client.reply()).status == 200
