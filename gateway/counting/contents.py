"""Does a chat template take a message's content as text or as a list of parts?

vLLM looks at the template's syntax tree (0.32, renderers/hf.py, content format `auto`): a template
that loops over the content of a message gets parts, any other gets text. The same question is
answered here by the same signs: a loop over `message.content` (or `message["content"]`), over a
macro's parameter that is called with it, or over a plain variable `content`. Only 0.33 follows messages
into a namespace. Where a template assigns them to an attribute, or unpacks them, 0.32 gives up.
"""

from __future__ import annotations

from jinja2 import nodes


def loops_over_parts(tree: nodes.Template) -> tuple[bool, ...]:
    """Return whether the template loops over the parts of a content; both, where that depends on the release."""
    return tuple({_is_seen_to_loop(tree, newer=newer) for newer in (False, True)})


class _Unreadable(Exception):
    """A form that vLLM gives up on, and then hands over text."""


def _is_seen_to_loop(tree: nodes.Template, *, newer: bool) -> bool:
    try:
        return _loops(tree, newer=newer)
    except _Unreadable:
        return False


def _loops(tree: nodes.Template, *, newer: bool) -> bool:
    messages = _message_names(tree, newer=newer)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _given_contents(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros[id(loop)] = given | in_macros.get(id(loop), set())
    for loop in tree.find_all(nodes.For):
        source = loop.iter
        if any(_leads_to(source, name, "content") for name in messages):
            return _named(loop)
        if isinstance(source, nodes.Name) and source.name in in_macros.get(id(loop), {"content"}):
            return _named(loop)
    return False


def _message_names(tree: nodes.Template, *, newer: bool) -> set[str]:
    """Return the loop variables that hold one message."""
    lists, unseen = {"messages"}, ["messages"]
    while unseen:
        name = unseen.pop()
        for assign in tree.find_all(nodes.Assign):
            new = _assigned(assign, name, newer=newer) - lists
            lists |= new
            unseen.extend(new)
    names = set()
    for loop in tree.find_all(nodes.For):
        if any(_leads_to(loop.iter, name) for name in lists) and _named(loop):
            names.add(loop.target.name)  # type: ignore[attr-defined]  # _named has looked
    return names


def _assigned(assign: nodes.Assign, name: str, *, newer: bool) -> set[str]:
    """Return the names that get a list of messages; one in a namespace has a dot, and only 0.33 follows it."""
    target, value = assign.target, assign.node
    if _leads_to(value, name):
        if isinstance(target, nodes.Name):
            return {target.name}
        if not newer:
            raise _Unreadable
        return {f"{target.name}.{target.attr}"} if isinstance(target, nodes.NSRef) else set()
    if newer and isinstance(target, nodes.Name) and isinstance(value, nodes.Call):
        of_namespace = isinstance(value.node, nodes.Name) and value.node.name == "namespace"
        kept = [each.key for each in value.kwargs if of_namespace and _leads_to(each.value, name)]
        return {f"{target.name}.{each}" for each in kept}
    return set()


def _given_contents(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Return the macro's parameters that some call gives a message's content."""

    def is_content(node: nodes.Node) -> bool:
        return any(_leads_to(node, name, "content") for name in messages)

    parameters = [each.name for each in macro.args]
    given = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        by_place = zip(parameters, call.args, strict=False)
        given |= {name for name, node in by_place if is_content(node)}
        given |= {each.key for each in call.kwargs if is_content(each.value)} & set(parameters)
    return given


def _leads_to(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is a variable (or its `key`), through filters and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not isinstance(node.arg, nodes.Const) or node.arg.value != key:
                return False
        elif not isinstance(node, nodes.Getattr) or node.attr != key:
            return False
        node = node.node
    space, _, attribute = name.rpartition(".")
    if space and isinstance(node, nodes.Getattr) and node.attr == attribute:
        node, name = node.node, space
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _named(loop: nodes.For) -> bool:
    if not isinstance(loop.target, nodes.Name):
        raise _Unreadable
    return True
