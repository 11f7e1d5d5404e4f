"""Chat templates and what comes before them; agreement with a real engine is tested in e2e."""

import time

import pytest

from gateway.counting.messages import Unmodelled
from gateway.counting.templates import ChatTemplate

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
USER = {"role": "user", "content": "hi"}


def render(source, request, **special):
    return ChatTemplate(source, special).render(request, until=time.monotonic() + 5)


def rendered(source, *messages, **more):
    return render(source, {"messages": list(messages), **more})


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


# --- what the template gets -----------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["{% set n.m = messages %}", ""])
def test_messages_in_a_namespace_are_counted_where_all_releases_hand_over_the_same(kept):
    """0.32 hands over text, and 0.33 parts."""
    begun = "{% set n = namespace(m=messages) %}" + kept + "{% for each in n.m %}"
    one_way = begun + "{% for part in each.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    either = (
        begun + "{% if each.content is string %}{{ each.content }}{% else %}"
        "{% for part in each.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    said = {"role": "user", "content": "abc"}
    assert rendered(either, said) == "abc"
    with pytest.raises(Unmodelled):
        rendered(one_way, said)


def test_messages_that_are_unpacked_are_counted_where_all_releases_hand_over_the_same():
    """0.32 gives up on them and hands over text; 0.33 looks on."""
    loops = "{% for each in messages %}{% for part in each.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    with pytest.raises(Unmodelled):
        rendered("{% set one, two = messages %}" + loops, *[{"role": "user", "content": "abc"}] * 2)


@pytest.mark.parametrize(
    "kept", ["n = namespace(last=messages | length)", "n = namespace(all=messages)"]
)
def test_a_namespace_with_messages_that_no_loop_goes_through_changes_nothing(kept):
    for source, text in (
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "hi"),
        (LOOPS[0], "[hi]"),
    ):
        assert rendered(f"{{% set {kept} %}}{source}", USER) == text


def test_parts_are_joined_for_a_template_that_takes_text():
    assert rendered(PLAIN, {"role": "user", "content": parts("a", "b")}) == "<user>a\nb"


LOOPS = [
    "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m['content'] | list %}[{{ p.text }}]{% endfor %}"
    "{% endfor %}",
    "{% set rest = messages[0:] %}{% for m in rest %}{% for p in m.content[0:] %}[{{ p.text }}]"
    "{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}[{{ p.text }}]"
    "{% endfor %}{% endfor %}",
    "{% macro show(what) %}{% for p in what %}[{{ p.text }}]{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(what) %}{% for p in what %}[{{ p.text }}]{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(what=m['content']) }}{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_loops_over_contents_gets_parts(source):
    assert rendered(source, USER) == "[hi]"
    assert rendered(source, {"role": "user", "content": parts("a", "b")}) == "[a][b]"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% endfor %}{{ m.content }}"
        "{% endfor %}",
        "{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}"
        "{% macro other() %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.role) }}{{ other() }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for c in m[m.role] %}{% endfor %}{{ m.content }}{% endfor %}",
    ],
)
def test_any_other_template_gets_text(source):
    assert rendered(source, USER) == "hi"


@pytest.mark.parametrize(
    "odd",
    [
        "{% for a, b in messages %}{% endfor %}",
        "{% for m in messages %}{% for a, b in m.content %}{% endfor %}{% endfor %}",
    ],
)
def test_a_loop_that_cannot_be_read_means_text(odd):
    source = "{% if false %}" + odd + "{% endif %}" + LOOPS[0].replace("{{ p.text }}", "{{ p }}")
    assert rendered(source, USER) == "[h][i]"


def test_a_list_under_another_name_is_still_the_messages():
    source = "{% set a = messages %}{% set a = messages[1:] %}" + LOOPS[2].replace("messages", "a")
    assert rendered(source, USER, USER) == "[hi]"


def test_a_tools_answer_is_always_text():
    source = "{% for m in messages %}{% for p in m.content %}{{ p }}.{% endfor %}{% endfor %}"
    assert rendered(source, {"role": "tool", "content": parts("a", "b")}) == "a.\n.b."


def test_arguments_of_tool_calls_become_mappings():
    source = "{% for c in messages[0].tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": "ü<"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert rendered(source, message) == (
        '{"id": "1", "function": {"arguments": {"a": "ü<"}, "name": "f"}, "type": "function"}'
    )
    for arguments in ("no json", "[1]", "", "null"):
        call["function"]["arguments"] = arguments
        assert '"arguments": {}' in rendered(source, message)


def test_tools_are_written_with_all_their_fields():
    tools = [
        {"type": "function", "x": 1, "function": {"name": "f", "y": 2}},
        {
            "type": "function",
            "defer_loading": True,
            "function": {"name": "g", "strict": False, "parameters": {}, "description": "d"},
        },
    ]
    out = rendered("{{ tools | tojson }}", USER, tools=tools)
    assert out == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}},'
        ' {"type": "function", "function": {"name": "g", "description": "d", "parameters": {},'
        ' "strict": false, "defer_loading": true}, "defer_loading": true}]'
    )


def test_a_developer_is_the_system_for_a_template_that_knows_none():
    developer = {"role": "developer", "content": "brief", "tools": []}
    assert rendered(PLAIN, developer, USER) == "<system>brief<user>hi"
    assert rendered(PLAIN, {"role": "system", "content": "a"}, USER, developer) == (
        "<system>a\n\nbrief<user>hi"
    )
    late = {"role": "developer", "content": parts("x", "y")}
    assert rendered(LOOPS[0].replace("p.text", "p"), USER, late) == (
        "[x][\n][y][{'type': 'text', 'text': 'hi'}]"
    )
    knowing = PLAIN + "{# 'developer' #}"
    assert rendered(knowing, developer, USER) == "<developer>brief<user>hi"


def test_the_billing_line_is_dropped():
    line = "x-anthropic-billing-header: cch=1"
    assert rendered(PLAIN, {"role": "system", "content": f"{line}\nbrief"}) == "<system>brief"
    assert rendered(PLAIN, {"role": "system", "content": line}) == "<system>"
    assert rendered(PLAIN, {"role": "user", "content": line}) == f"<user>{line}"


def test_names_and_ids_of_calls_reach_the_template():
    source = "{% for m in messages %}{{ m.name }}{{ m.tool_call_id }};{% endfor %}"
    answer = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    assert rendered(source, {**USER, "name": "ada"}, answer, {**USER, "name": 1}) == "ada;c1;;"


def test_reasoning_has_both_names():
    source = "{% for m in messages %}{{ m.reasoning }}={{ m.reasoning_content }};{% endfor %}"
    old, new = ({"role": "assistant", name: "r"} for name in ("reasoning_content", "reasoning"))
    assert rendered(source, old, new) == "r=r;r=r;"


def test_only_variables_that_the_template_looks_at_are_passed():
    source = "{{ seen }}{{ messages[0].role }}"
    kwargs = {"seen": 1, "unseen": 2}
    assert rendered(source, USER, chat_template_kwargs=kwargs) == "1user"
    assert rendered(source, USER, chat_template_kwargs={"seen": None}) == "user"
    assert rendered(source, USER, chat_template_kwargs={"seen": "auto"}) == "user"


def test_an_effort_switches_thinking_on_unless_told():
    source = "{{ reasoning_effort }},{{ enable_thinking }}"
    assert rendered(source, USER, reasoning_effort="low") == "low,True"
    assert rendered(source, USER, reasoning_effort="none") == "none,False"
    told = {"enable_thinking": False}
    assert rendered(source, USER, reasoning_effort="low", chat_template_kwargs=told) == "low,False"


def test_special_tokens_and_the_generation_prompt_reach_the_template():
    source = "{{ bos_token }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source, {"messages": [USER]}, bos_token="<s>") == "<s>>"
    assert render(source, {"messages": [USER], "add_generation_prompt": False}) == ""


def test_jinja_is_set_up_as_templates_expect():
    source = (
        "{% generation %}\n  {{- {'b': 'ü', 'a': '<'} | tojson(indent=1, sort_keys=true) }}\n"
        "{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    assert rendered(source, USER) == '{\n "a": "<",\n "b": "ü"\n}\n014'


def test_documents_reach_the_template():
    source = "{% for d in documents %}{{ d.text }}{% endfor %}"
    assert rendered(source, USER, documents=[{"text": "a"}, {"text": "b"}]) == "ab"


# --- what only the engine knows -------------------------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
UNKNOWN = {
    "no messages": {"messages": []},
    "messages of another type": {"messages": "hi"},
    "a message without role": {"messages": [{"content": "hi"}]},
    "a message that is text": {"messages": ["hi"]},
    "a content of another type": {"messages": [{"role": "user", "content": 1}]},
    "an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    },
    "an untyped part": {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
    "a part with an id": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "uuid": "1"}]}]
    },
    "a part that is text": {"messages": [{"role": "user", "content": ["a"]}]},
    "a thought without text": {"messages": [{"role": "user", "content": [{"type": "thinking"}]}]},
    "a final message to continue": {"messages": [USER], "continue_final_message": True},
    "tools that may not be shown": {
        "messages": [USER],
        "tools": [{"function": {"name": "f"}}],
        "tool_choice": "none",
    },
    "no tools": {"messages": [USER], "tools": []},
    "another kind of tool": {"messages": [USER], "tools": [{"type": "web", "function": {}}]},
    "a tool without a name": {"messages": [USER], "tools": [{"function": {"name": 1}}]},
    "a schema of another type": {
        "messages": [USER],
        "tools": [{"function": {"name": "f", "parameters": []}}],
    },
    "a strictness of another type": {
        "messages": [USER],
        "tools": [{"function": {"name": "f", "strict": 1}}],
    },
    "documents of another type": {"messages": [USER], "documents": ["a"]},
    "another template": {"messages": [USER], "chat_template": "{{ messages }}"},
    "arguments of the engine": {"messages": [USER], "chat_template_kwargs": {"tokenize": True}},
    "arguments of another type": {"messages": [USER], "chat_template_kwargs": [1]},
    "tool calls of another type": {"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]},
    "another kind of call": {
        "messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]
    },
    "a call without id": {
        "messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": None}]}]
    },
}


@pytest.mark.parametrize("request_body", UNKNOWN.values(), ids=list(UNKNOWN))
def test_what_only_the_engine_knows_is_left_to_it(request_body):
    with pytest.raises(Unmodelled):
        render(PLAIN, request_body)


def test_an_empty_text_part_is_skipped():
    message = {"role": "user", "content": [{"type": "text", "text": None}, *parts("a")]}
    assert rendered(PLAIN, message) == "<user>a"


# --- templates that misbehave ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ [0] * 1000000000 }}",
        "{{ 9 ** 999999999 }}",
        "{{ 1 / 0 }}",
        "{{ undefined.more }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_leaves_the_count_to_the_engine(source):
    with pytest.raises(Unmodelled):
        rendered(source, USER)


def test_small_repetitions_and_powers_work():
    assert rendered("{{ '-' * 3 }}{{ 2 ** 5 }}{{ 2 * 3 }}", USER) == "---326"


def test_a_template_is_stopped_at_its_deadline():
    source = (
        "{% for i in range(90000) %}{% for j in range(90000) %}x{{ i }}{% endfor %}{% endfor %}"
    )
    began = time.monotonic()
    with pytest.raises(Unmodelled):
        ChatTemplate(source, {}).render({"messages": [USER]}, until=began + 0.05)
    assert time.monotonic() - began < 2
