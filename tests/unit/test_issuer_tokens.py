"""Tokens of an identity provider: who is let in by one, and who is not."""

import asyncio
import base64
import json

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from gateway.access.issuer import ASK_AGAIN_S, Issuer
from gateway.access.keyfile import make_pepper, read_pepper
from gateway.access.keys import KeyRing
from gateway.access.salt import salting_secret
from gateway.access.tokens import Tokens
from gateway.config.keysettings import KeySettings
from gateway.config.oidc import OidcConfig
from gateway.core.errors import AccessError, KeysUnknown
from tests.issuing import AUDIENCE, Provider
from tests.storecases import HeldClock

NOW = 1_800_000_000.0
TIERS = {
    "gold": KeySettings.model_validate({"models": ["qwen*"], "priority": 7}),
    "free": KeySettings.model_validate({"models": ["small"], "max_output": 100}),
}
OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


class Desk:
    """A ring whose only callers are those of a provider."""

    def __init__(self, provider=None, **settings):
        self.provider = provider or Provider()
        self.clock = HeldClock()
        told = {"issuer": self.provider.url, "audience": AUDIENCE, **settings}
        self.issuer = Issuer(OidcConfig.model_validate(told), self.clock, self.provider.page)
        self.ring = KeyRing((), b"p" * 32, TIERS, tokens=Tokens(self.issuer))
        self.issuer.on_change.append(self.ring.check_anew)

    def fetch(self):
        asyncio.run(self.issuer.fetch())
        return self

    def caller(self, token, now=NOW):
        return self.ring.authenticate(f"Bearer {token}".encode(), None, None, now)

    def refusal(self, token, now=NOW, kind=AccessError):
        with pytest.raises(kind) as caught:
            self.caller(token, now)
        assert token not in caught.value.message
        return caught.value


@pytest.fixture
def desk():
    return Desk().fetch()


def test_a_token_lets_its_holder_in(desk):
    caller = desk.caller(desk.provider.token(sub="ann"))
    assert (caller.name, caller.tenant, caller.models) == ("ann", "ann", ("*",))
    assert caller.key_id.startswith("oidc")
    assert len(caller.key_id) == 16
    assert desk.caller(desk.provider.token(sub="ann", exp=NOW + 60)).key_id == caller.key_id
    assert desk.caller(desk.provider.token(sub="bob")).key_id != caller.key_id


def test_claims_say_who_it_is_and_what_it_may_do():
    names = {
        "name": "email",
        "tenant": "org.id",
        "tier": "roles",
        "models": "https://x.example/models",
    }
    desk = Desk(claims=names).fetch()
    told = {"email": "ann@x", "org": {"id": "acme"}, "roles": ["staff", "gold", "free"]}
    caller = desk.caller(desk.provider.token(**told, **{"https://x.example/models": "sql qwen-*"}))
    assert (caller.name, caller.tenant, caller.priority) == ("ann@x", "acme", 7)
    assert caller.models == ("sql", "qwen-*")


@pytest.mark.parametrize(
    ("claims", "named"),
    [
        ({"org": None}, "`org`"),
        ({"org": 17}, "`org`"),
        ({"org": "two\nlines"}, "`org`"),
        ({"may": []}, "`may`"),
        ({"may": [3]}, "`may`"),
        ({"may": None}, "`may`"),
        ({"plan": "platinum"}, "`plan`"),
        ({"plan": None}, "`plan`"),
    ],
)
def test_a_claim_that_is_asked_for_and_missing_lets_nobody_in(claims, named):
    desk = Desk(claims={"tenant": "org", "models": "may", "tier": "plan"}).fetch()
    told = {"org": "acme", "may": ["sql"], "plan": "gold"}
    assert desk.caller(desk.provider.token(**told)).tenant == "acme"
    refused = desk.refusal(desk.provider.token(**{**told, **claims}))
    assert (refused.status, named in refused.message) == (401, True)


def test_without_a_claim_the_tier_is_the_one_of_the_settings():
    desk = Desk(tier="free", claims={"tier": "plan"}).fetch()
    assert desk.caller(desk.provider.token()).max_output_tokens == 100
    assert desk.caller(desk.provider.token(plan="gold")).priority == 7
    assert Desk(tier="free").fetch().caller(desk.provider.token(plan="gold")).models == ("small",)


def test_a_tier_that_a_reload_took_away_lets_no_token_in_without_its_limits():
    desk = Desk(tier="gold").fetch()
    tokens = desk.ring.tokens  # as at the start: `keys.oidc` changes with a restart only
    desk.ring = KeyRing((), b"p" * 32, {"premium": TIERS["gold"]}, tokens=tokens)
    assert desk.refusal(desk.provider.token(sub="ann")).code == "unknown_tier"
    desk.ring = KeyRing((), b"p" * 32, TIERS, tokens=tokens)
    assert desk.caller(desk.provider.token(sub="ann")).priority == 7


def test_a_token_holds_until_it_ends_and_not_before_it_begins(desk):
    token = desk.provider.token(exp=NOW + 10, nbf=NOW - 10)
    assert desk.caller(token, NOW + 9.9)
    assert "ended 2027-01-15T08:00:10Z" in desk.refusal(token, NOW + 10).message
    early = desk.provider.token(exp=NOW + 20, nbf=NOW - 10)
    assert "does not hold before" in desk.refusal(early, NOW - 71).message
    assert desk.caller(early, NOW - 69)  # clocks differ


def test_a_token_whose_signing_key_was_withdrawn_ends_once_that_is_known(desk):
    token = desk.provider.token()
    assert desk.caller(token)
    desk.provider.keys = {"k2": OTHER}
    assert desk.caller(token, NOW + 599)
    desk.fetch()
    assert "does not list" in desk.refusal(token, NOW + 599).message


def test_what_the_provider_lists_as_before_has_no_token_checked_again(desk):
    heard = []
    desk.issuer.on_change.append(lambda: heard.append(1))
    desk.fetch().fetch()
    assert not heard
    desk.provider.broken = True
    desk.fetch()
    desk.provider.broken, desk.provider.keys = False, {"k2": OTHER}
    desk.fetch()
    assert heard == [1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"aud": "another"}, "not for this gateway"),
        ({"aud": None}, "`aud`"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"iss": None}, "`iss`"),
        ({"exp": None}, "`exp`"),
        ({"exp": "soon"}, "`exp`"),
        ({"exp": 1e300}, "`exp`"),
        ({"sub": None}, "`sub`"),
        ({"key": OTHER}, "signature"),
        ({"kid": None, "key": OTHER}, "signature"),
    ],
)
def test_what_is_not_right_lets_nobody_in(desk, change, told):
    refused = desk.refusal(desk.provider.token(**change))
    assert (refused.status, told in refused.message) == (401, True)


def segment(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def test_a_token_that_is_not_signed_or_signed_with_what_everybody_knows_lets_nobody_in(desk):
    claims = {"iss": desk.provider.url, "aud": AUDIENCE, "sub": "ann", "exp": 4_000_000_000}
    for algorithm in ("none", "None", "HS256"):
        head = segment({"alg": algorithm, "kid": "k1", "typ": "JWT"})
        assert desk.refusal(f"{head}.{segment(claims)}.").status == 401
    public = desk.provider.listed()[0]["n"]
    symmetric = jwt.encode(claims, public, algorithm="HS256", headers={"kid": "k1"})
    assert desk.refusal(symmetric).status == 401


DEEP = base64.urlsafe_b64encode(b'{"a":' + b"[" * 5000).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "token",
    ["eyJ", "eyJ.a.b", "eyJhbGciOiJSUzI1NiJ9..", "eyJ" + "x" * 9000, f"{DEEP}.e30.eA"],
    ids=["begins", "no JSON", "empty", "long", "deep"],
)
def test_what_only_looks_like_a_token_is_refused(desk, token):
    assert desk.refusal(token).status == 401


def test_tokens_are_no_keys_where_no_provider_is_named():
    ring = KeyRing((), b"p" * 32)
    with pytest.raises(AccessError, match="does not look like a key"):
        ring.authenticate(b"Bearer " + Provider().token().encode(), None, None, NOW)


def test_before_the_keys_are_known_clients_are_told_to_come_again():
    desk = Desk(Provider(broken=True)).fetch()
    assert desk.refusal(desk.provider.token(), kind=KeysUnknown).retry_after_s == 2.0


def test_before_the_keys_are_known_tokens_have_them_asked_for_only_now_and_then():
    desk = Desk(Provider(broken=True)).fetch()

    async def ask():
        for _ in range(20):
            desk.refusal(desk.provider.token(), kind=KeysUnknown)
            await asyncio.sleep(0)
        return desk.provider.asked

    async def story():
        async with asyncio.TaskGroup() as group:
            following = group.create_task(desk.issuer.run())
            asked = [await ask()]
            desk.clock.at += ASK_AGAIN_S
            asked.append(await ask())
            following.cancel()
        return asked

    assert asyncio.run(story()) == [1, 2]


@pytest.mark.parametrize(
    "row",
    [
        {"kty": "EC", "kid": "x", "crv": "of another time", "x": "AA", "y": "AA"},
        {"kty": "RSA", "kid": "x", "n": 17, "e": "AQAB"},
        {"kty": "OKP", "kid": "x"},
        {"kty": "OKP", "kid": "k1"},
        {"kty": "RSA", "kid": "x", "alg": "none", "n": "AQAB", "e": "AQAB"},
    ],
)
def test_a_key_that_cannot_be_used_spoils_no_other(row):
    desk = Desk(Provider(strange=[row])).fetch()
    assert desk.caller(desk.provider.token()).name == "ann"


def test_a_key_that_is_new_is_asked_for_and_one_that_nobody_has_only_now_and_then(desk):
    desk.provider.keys["k2"] = ec.generate_private_key(ec.SECP256R1())
    token = desk.provider.token(kid="k2", algorithm="ES256")
    assert "does not list" in desk.refusal(token).message  # it was asked a moment ago
    desk.clock.at += ASK_AGAIN_S
    desk.refusal(token, kind=KeysUnknown)
    desk.fetch()
    assert desk.caller(token).name == "ann"
    unknown = desk.provider.token(kid="k9", key=OTHER)
    assert [desk.refusal(unknown).status for _ in range(3)] == [401] * 3
    assert desk.provider.asked == 2


def test_while_the_provider_does_not_answer_the_keys_before_stay(desk):
    desk.provider.broken = True
    desk.fetch()
    assert desk.caller(desk.provider.token()).name == "ann"


def test_a_provider_that_calls_itself_otherwise_is_not_believed(desk):
    other = Desk(issuer="http://localhost:1")
    assert asyncio.run(other.issuer.fetch()) is None
    other.refusal(other.provider.token(), kind=KeysUnknown)


def test_the_priorities_of_tiers_count_where_tokens_can_have_them(desk):
    assert desk.ring.priorities(NOW) == {0, 7}
    assert KeyRing((), b"p" * 32, TIERS).priorities(NOW) == set()


def test_a_change_of_keys_keeps_the_tokens(desk):
    assert desk.ring.with_changes((), set()).tokens is desk.ring.tokens


# --- algorithms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["RS256", "RS512", "PS256"])
def test_an_rsa_key_that_names_no_algorithm_is_for_each(desk, algorithm):
    assert "alg" not in desk.provider.listed()[0]
    assert desk.caller(desk.provider.token(algorithm=algorithm)).name == "ann"


@pytest.mark.parametrize(
    ("algorithm", "key"), [("ES256", ec.generate_private_key(ec.SECP256R1())), ("HS256", b"s" * 32)]
)
def test_a_token_of_another_kind_than_its_key_is_refused(desk, algorithm, key):
    refused = desk.refusal(desk.provider.token(algorithm=algorithm, key=key))
    assert "its signature is not the issuer's" in refused.message


@pytest.mark.parametrize("text", [None, "version: 1\nkeys: []\n"])
def test_who_holds_a_token_has_the_same_salt_after_a_start_although_there_are_no_keys(
    tmp_path, text
):
    path, tokens = tmp_path / "keys.yaml", Tokens(Desk().issuer)
    make_pepper(path)
    if text is not None:
        path.write_text(text)
    secret = KeyRing.load(path, TIERS, tokens).salting
    assert KeyRing.load(path, TIERS, tokens).salting == secret == salting_secret(read_pepper(path))


def test_who_holds_a_token_has_the_same_salt_in_each_worker_and_after_a_restart(tmp_path):
    rings = [KeyRing.load(tmp_path / "keys.yaml", {}, Tokens(Desk().issuer)) for _ in range(2)]
    assert len({ring.salting for ring in rings}) == 1
