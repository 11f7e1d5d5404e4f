"""Rules about the command line: flags that do not exist, values that do not go together.

Source: argparse; vLLM's config/*.py, engine/arg_utils.py, entrypoints (messages of 0.5 to 0.32).
"""

from __future__ import annotations

import re
from typing import Final

from gateway.config.supervision import Remedy
from gateway.vllmlog.rules.rule import HINT, Found, Rule
from gateway.vllmlog.verdict import Advice, Kind

_QUANTIZED: Final = re.compile(
    r"^(?:\w{0,30}\.)*(?:\w{0,30}(?:scale|zp|quant|num_bits)\w{0,30}|group_size)\b"
)


def _flags(found: Found) -> tuple[Advice, ...]:
    flags = [word for word in (found.groups.get("unknown") or "").split() if word.startswith("-")]
    why = "this version of vLLM does not know it; `vllm serve --help=all` lists its flags"
    return tuple(Advice(flag.partition("=")[0], None, why, remove=True) for flag in flags[:8])


def _choices(found: Found) -> str:
    """Return the values that a message lists, without what encloses the list."""
    return re.sub(r"^[\s({]+|[\s)}]+'?$", "", found.groups.get("choices") or "")


def _one_flag(found: Found) -> tuple[Advice, ...]:
    names = (found.groups.get("flag") or "").split("/")
    choices = _choices(found)
    why = f"one of {choices}" if choices else "a value that it takes, see `vllm serve --help=all`"
    if "<function loads" in (found.groups.get("what") or ""):
        why = "valid JSON, in single quotes on a shell's command line"
    value = "auto" if choices and "'auto'" in choices else None
    return (Advice(names[0], value, why[:300]),)


def _derived(found: Found) -> tuple[Advice, ...]:
    value = str(int(found.number("most") or 0)) if found.number("most") else None
    return (
        Advice("--max-model-len", value, "the longest context that the model was made for",
               Remedy.LOWER_MAX_MODEL_LEN),
        Advice("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1", "unsafe: answers beyond that length may be nonsense"),
    )  # fmt: skip


def _batched(found: Found) -> tuple[Advice, ...]:
    needed = found.number("needed")
    value = str(int(needed)) if needed else None
    return (
        Advice(
            "--max-num-batched-tokens",
            value,
            "at least the context length (or the number of sequences)",
        ),
        Advice("--enable-chunked-prefill", None, "long prompts then go in several steps"),
    )


def _agreeing(found: Found) -> tuple[Advice, ...]:
    other = (found.groups.get("other") or "").replace("_", "-")
    flag = f"--{other}" if other else ""
    return (Advice(flag, found.groups.get("given"), "so that both are compatible"),)


def _of_fields(found: Found) -> Kind:
    """Tell by the fields that the lines below name: those of a checkpoint's quantisation are no flags."""
    below = found.start.lines[found.place + 1 : found.place + 4]
    named = any(_QUANTIZED.search(line.text) for line in below)
    return Kind.QUANTIZATION if named else Kind.BAD_ARGUMENT


RULES: Final[tuple[Rule, ...]] = (
    Rule("unrecognized", Kind.BAD_ARGUMENT,
         r"error: unrecognized arguments?: (?P<unknown>.{1,500})", "Unknown flags: {unknown}.",
         remedies=_flags),
    Rule("argument", Kind.BAD_ARGUMENT,
         r"error: argument (?P<flag>--?\S{1,100}?):? (?P<what>(?:invalid|expected|not allowed|ignored|ambiguous"
         r"|Value|JSON|unknown)"
         r".{0,80}?)(?: \(choose from (?P<choices>.{1,400}?)\)?)?$",
         "{flag}: {what}.", remedies=_one_flag),
    Rule("argument_other", Kind.BAD_ARGUMENT,
         r"^[\w./ -]{0,80}: error: (?P<what>(?:argument|the following arguments|ambiguous option|one of the arguments"
         r"|expected|too (?:few|many)|unsupported|invalid|No such option|Missing|the --|With `).{0,300})"
         r"|Unrecognized arguments?:",
         "The command line was refused: {what}.", rank=1,
         remedies=(Advice("", None, "`vllm serve --help=all` lists the flags of this version"),)),
    Rule("max_model_len", Kind.BAD_ARGUMENT,
         r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
         r"\((?:[^)]{0,200}?=)?(?P<most>\d+)",
         "max_model_len {asked} is more than the model's limit of {most}.", remedies=_derived),
    Rule("batched_tokens", Kind.BAD_ARGUMENT,
         r"max_num_batched_tokens \((?P<given>\d+)\) (?:is smaller than max_model_len"
         r"|must be greater than or equal to "
         r"max_num_seqs) \((?P<needed>\d+)\)",
         "max_num_batched_tokens {given} is less than the {needed} that are needed.", remedies=_batched),
    Rule("active_seqs", Kind.BAD_ARGUMENT,
         r"max_num_active_seqs .{0,80}cannot be greater than|max_num_partial_prefills .{0,80}must be",
         "Two limits of the scheduler contradict each other.",
         remedies=(Advice("--max-num-seqs", None, "at least the other limit"),)),
    Rule("block_too_large", Kind.BAD_ARGUMENT,
         r"(?P<what>max_num_batched_tokens|block_size|mamba_block_size|Max.{0,40}) .{0,120}must be "
         r"(?:greater than or equal to|<=|>=|a multiple of|less than|larger than|at least) .{0,80}?(?P<needed>\d+)?",
         "{what} conflicts with another setting.", rank=1, remedies=_batched),
    Rule("contradiction", Kind.BAD_ARGUMENT,
         r"(?P<what>\b\w{3,40}) \((?P<given>\d+)\) (?:is|must be) (?P<how>(?:larger|smaller|greater|less|lower"
         r"|higher) than)"
         r"(?: or equal to)? (?:the )?(?P<other>\w{3,40}) \((?P<needed>\d+)\)",
         "{what} is {given}, which conflicts with {other} {needed}.", rank=1,
         remedies=_agreeing),
    Rule("numa", Kind.BAD_ARGUMENT, r"NUMA binding was requested",
         "NUMA binding was requested, but the NUMA nodes of the GPUs are unknown.",
         remedies=(Advice("--numa-bind-nodes", None, "name the nodes"),
                   Advice("--numa-bind", None, "or do without", remove=True))),
    Rule("backend_invalid", Kind.BAD_ARGUMENT,
         r"Selected backend \S{1,80} is not valid for this configuration|Invalid (?:value for )?attention backend"
         r"|Unknown attention backend|(?:attention backend|VLLM_ATTENTION_BACKEND).{0,120}(?:not supported"
         r"|is not valid|Invalid|not found)"
         r"|Backend \S{1,60} must be registered|does not support (?:kv_cache_dtype|fp8 kv)",
         "The requested attention backend does not support these settings.",
         remedies=(Advice("--attention-backend", None, "leave it out, or choose another"),
                   Advice("--kv-cache-dtype", "auto", "a cache dtype that it supports"))),
    Rule("kv_dtype", Kind.BAD_ARGUMENT,
         r"(?:kv[-_ ]cache[-_ ]dtype|kv_cache_dtype|KV cache dtype).{0,160}(?:not supported|unsupported"
         r"|only supports?|requires?|must be|is not)"
         r"|(?:only supports?|requires?) .{0,60}(?:kv[-_ ]cache|kv_cache_dtype)",
         "The KV cache dtype is not compatible with the model or its attention backend.", rank=1,
         remedies=(Advice("--kv-cache-dtype", "auto", "what the backend supports, or the one that it names"),)),
    Rule("parser", Kind.BAD_ARGUMENT,
         r"invalid (?P<what>tool call|reasoning) parser: (?P<name>.{1,80}?)(?: \(chose from (?P<choices>.{1,600}))?$",
         "There is no {what} parser {name}.",
         remedies=lambda found: (Advice(
             "--tool-call-parser" if found.groups.get("what") == "tool call" else "--reasoning-parser", None,
             f"one of {_choices(found) or 'those in --help=all'}"[:400]),)),
    Rule("api_servers", Kind.BAD_ARGUMENT,
         r"VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with",
         "Adapters cannot be loaded at run time with several API servers.",
         remedies=(Advice("--api-server-count", "1", "one API server"),)),
    Rule("pipeline", Kind.BAD_ARGUMENT, r"Pipeline parallelism is not supported for this model",
         "This model cannot be split into pipeline stages.",
         remedies=(Advice("--pipeline-parallel-size", "1", "use tensor parallelism"),)),
    Rule("setting_refused", Kind.BAD_ARGUMENT,
         r"(?:Error: |^).{0,40}?\b(?P<other>(?!head_|hidden_|vocab_|group_|intermediate_|quant_)[a-z]\w{2,40}_"
         r"(?:backend|dtype|size|mode|parser|format|impl|count|len|seqs|tokens|layout|type|config|method|ratio"
         r"|utilization)) ?= ?(?P<given>'[^']{1,80}'|\"[^\"]{1,80}\"|[\w.-]{1,40}) (?:is|must|does|cannot|requires"
         r"|for)\b"
         r"(?! not divisible).{0,20}(?:not |in|be |only |requires)",
         "The setting {other}={given} was refused.", sure=False, remedies=lambda found: (
             Advice(f"--{found.groups['other'].replace('_', '-')}", None, "what the message allows"),)),
    Rule("requires_flag", Kind.BAD_ARGUMENT,
         r"(?:Error|error): .{0,120}(?:--[a-z][\w-]{3,40}).{0,60}(?:requires?|cannot be used|is not supported"
         r"|must be (?:set|used|specified)|incompatible)"
         r"|(?:Error|error): .{0,120}(?:requires?|cannot be used with|must (?:set|use"
         r"|specify)) `?(?:--[a-z][\w-]{3,40})",
         "Two flags conflict with each other.", rank=1,
         remedies=(Advice("", None, "follow the message: change or remove the flag that it names"),)),
    Rule("topic_setting", Kind.BAD_ARGUMENT,
         r"^(?:\w+\.)*(?:Value|Assertion|NotImplemented|Type)Error: ['\"`]?(?P<other>--[a-z][\w-]+"
         r"|[a-z]{2,20}(?:_[a-z\d]+)+|[A-Z]+(?:_[A-Z\d]+)+)\b['\"`]?\S{0,20} (?:was|must|is|cannot|can|requires?"
         r"|should|needs?|exceeds|only)\b",
         "The start failed, and the error begins with the setting {other}.", rank=HINT + 2,
         remedies=(Advice("", None, "change or remove the setting that the error names"),)),
    Rule("validation", Kind.BAD_ARGUMENT,
         r"validation errors? for (?P<what>(?:Model|Cache|Scheduler|Parallel|Load|LoRA|Speculative|Compilation"
         r"|Observability"
         r"|KVTransfer|KVEvents|Attention|Offload|Structured\w{0,20}|Multi\w{0,20}|Pooler|Device|Vllm|EPLB"
         r"|Profiler|Kernel)"
         r"\w{0,20}Config)(?: (?P<detail>.{1,300}?)(?: \[type=|$))?",
         "A setting of {what} is not valid: {detail}.", rank=3, refine=_of_fields,
         remedies=(Advice("", None, "correct the setting that the lines below the evidence name"),)),
)  # fmt: skip
