"""Drive the gateway with Cohere's SDK, both versions of its API; prints one JSON object of findings."""

import json
import sys
import time

import cohere

url, key, model = sys.argv[1:4]
found: dict[str, object] = {"version": cohere.__version__}
documents = ["a", "b"]
once = {"max_retries": 0}


def failure(call):
    try:
        call()
    except cohere.core.ApiError as error:
        return [type(error).__name__, error.status_code]
    return None


def timed(case, call):
    started = time.monotonic()
    found[case] = call()
    found[case + "_waited"] = time.monotonic() - started


for version, kind in (("1", cohere.Client), ("2", cohere.ClientV2)):
    client = kind(base_url=url, api_key=key)
    reply = client.rerank(model=model, query="x", documents=documents, top_n=1)
    found[f"rerank_v{version}"] = [len(reply.results), 0 < reply.results[0].relevance_score < 1]
    found[f"rerank_no_model_v{version}"] = failure(
        lambda client=client: client.rerank(
            model="none", query="x", documents=documents, request_options=once
        )
    )
    wrong = kind(base_url=url, api_key="gw_wrong")
    found[f"rerank_bad_key_v{version}"] = failure(
        lambda client=wrong: client.rerank(
            model=model, query="x", documents=documents, request_options=once
        )
    )
client = cohere.ClientV2(base_url=url, api_key=key)


def ask(name):
    return client.rerank(
        model=name, query="x", documents=documents, request_options={"max_retries": 1}
    )


timed("rerank_down", lambda: failure(lambda: ask("down")))
timed("rerank_limited", lambda: failure(lambda: ask("busy")))
print(json.dumps(found))
