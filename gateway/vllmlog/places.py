"""What an exception without words of its own is about: its type, then the innermost frame that tells.

A JSON error below `tokenization_*` is the tokenizer's, a KeyError below `load_weights` the checkpoint's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gateway.vllmlog.errors import Raised
from gateway.vllmlog.verdict import Advice, Kind, When

_INNERMOST: Final = 25  # frames that are asked
# A mistake in a program, or versions that do not fit: where it happens says nothing about why.
_MISTAKES: Final = frozenset(
    {
        "AttributeError",
        "NameError",
        "TypeError",
        "UnboundLocalError",
        "ZeroDivisionError",
        "RecursionError",
    }
)
_FLAG: Final = re.compile(r"--[a-z][\w-]+")  # but vLLM refuses flags with a TypeError as well


@dataclass(frozen=True, slots=True)
class Place:
    """One row of the table: what was being done there, and what helps as a rule."""

    kind: Kind
    doing: str
    helps: tuple[Advice, ...]
    frames: str = "(?!)"  # searched in `File "...", line 1, in function`
    types: str = ""  # of the exception, whose last name is matched as a whole; empty: any
    alone: str = "(?!)"  # types that tell it wherever they are raised
    words: str = "(?!)"  # of any exception, wherever it is raised


def _helps(why: str, flag: str = "") -> tuple[Advice, ...]:
    return (Advice(flag, None, why),)


_REFUSES: Final = (
    r"(?:Value|NotImplemented|Assertion|Type|ArgumentType|VLLMValidation|Validation)Error"
)
_ABSENT: Final = (
    r"(?:OS|Environment|FileNotFound|HFValidation|NotADirectory|RepositoryNotFound)Error"
)
_UNFIT: Final = r"(?:Value|Key|NotImplemented|Attribute|Assertion|Type|Index)Error"
# What runs as it is imported, and is not the program itself.
_IMPORTING: Final = r"(?:/(?!api_server|__main__|serve)[\w.-]+){2}\.py\", line \d+, in <module>$"
_CONNECTS: Final = (
    r"(?:Connection|ConnectTimeout|ConnectError|ReadTimeout|ReadError|Timeout|TimeoutException|MaxRetry|SSL|Proxy"
    r"|NameResolution|ConnectionReset|HTTP|HTTPStatus|HfHubHTTP|ChunkedEncoding|ClientConnector\w*|gaierror)(?:Error)?"
)

PLACES: Final = (
    Place(Kind.MODEL_GATED, "because the model is gated",
          _helps("a token of an account that may read it", "HF_TOKEN"), alone="GatedRepoError"),
    Place(Kind.OTHER, "while importing a package",
          _helps("install the package, in the version that the line names"), _IMPORTING,
          alone="ImportError|ModuleNotFoundError|DistributionNotFound|VersionConflict|PackageNotFoundError"),
    Place(Kind.WEIGHTS, "because a JSON file of the model is damaged",
          _helps("download the model's files again and compare their checksums"),
          words=r"\bnot (?:a )?valid JSON file"),
    Place(Kind.OTHER, "because a package is not the one that is expected",
          _helps("the versions that vLLM pins; no file of that name in PYTHONPATH or the working folder"),
          words=r"^AttributeError: (?:partially initialized )?module '[\w.]+' has no attribute"),
    Place(Kind.OTHER, "because two packages do not fit together", _helps("the versions that vLLM pins"),
          words=r"unexpected keyword argument|required positional argument|takes \d+ positional arguments?"),
    Place(Kind.MODEL_NOT_FOUND, "because the model was not found",
          _helps("the folder or the hub's exact name", "--model"),
          r"transformers_utils/(?:config|repo_utils|utils)\.py|configuration_utils\.py|utils/hub\.py"
          r"|file_download\.py|_snapshot_download\.py|in create_model_config$",
          _ABSENT, "RepositoryNotFoundError|RevisionNotFoundError|HFValidationError|EntryNotFoundError"),
    Place(Kind.NETWORK, "while downloading",
          _helps("a cache that holds the model, or a hub that can be reached", "HF_HOME"),
          r"/(?:urllib3|httpcore|httpx|requests|aiohttp|huggingface_hub|hf_xet)/", _CONNECTS,
          "LocalEntryNotFoundError|OfflineModeIsEnabled|MaxRetryError|NameResolutionError"),
    Place(Kind.LORA, "while loading an adapter", _helps("adapters that fit the model", "--lora-modules"),
          r"vllm/lora/|/peft/|vllm_ascend/lora/"
          r"|in (?:add_lora|load_lora_adapter|_load_adapter|init_static_loras)$"),
    Place(Kind.CHAT_TEMPLATE, "while reading the chat template",
          _helps("a .jinja file for this model", "--chat-template"),
          r"/jinja2/|chat_template", alone=r"Template\w{0,20}Error|TemplateNotFound|UndefinedError"),
    Place(Kind.NO_KERNEL, "because a kernel does not run on this GPU", _helps("a build for this GPU"),
          r"in (?:cutlass|deep_gemm|fp8_gemm)\w*$", "RuntimeError"),
    Place(Kind.QUANTIZATION, "while setting up the quantisation",
          _helps("another checkpoint, or a version of vLLM that knows this one", "--quantization"),
          r"/quantization/|fused_moe/(?:oracle|experts)|/compressed_tensors/|/bitsandbytes/|/quantizers/"
          r"|config/quantization\.py|in (?:get_quant_config|_verify_quantization|get_quantization_config"
          r"|create_weights|process_weights_after_loading|get_quant_method|maybe_update_config)$"),
    Place(Kind.TOKENIZER, "while loading the tokenizer or the processor",
          _helps("put their files beside the weights, or name the base model's", "--tokenizer"),
          r"/tokeniz(?!er_group)|/sentencepiece/|/tiktoken/|/mistral_common/|image_process|video_process"
          r"|processing_(?:auto|utils)|feature_extraction_|transformers_utils/processor|in \w*_tokenizer$"),
    Place(Kind.WEIGHTS, "while loading the weights",
          _helps("download the checkpoint again and compare its checksums"),
          r"/safetensors/|weight_utils\.py|/gguf/|in (?:\w*load_weights\w*|\w*weight_loader\w*"
          r"|load_state_dict|_load_module|\w*weights_iterator|_prepare_weights)$",
          alone="SafetensorError|UnpicklingError"),
    Place(Kind.NCCL, "while connecting its processes", _helps("says which call fails", "NCCL_DEBUG"),
          r"torch/distributed/|device_communicators/|vllm/distributed/(?:parallel_state|utils|stateless)",
          alone=r"Dist(?:Backend|Network|Store)?Error"),
    Place(Kind.BAD_ARGUMENT, "while reading the TLS certificate or its key",
          _helps("files that exist and that its user may read", "--ssl-certfile, --ssl-keyfile, --ssl-ca-certs"),
          r"in (?:create_ssl_context|load_cert_chain|load_verify_locations)$"),
    Place(Kind.BAD_ARGUMENT, "while opening its UNIX socket",
          _helps("a path whose folder exists, and where its user may write", "--uds"),
          r"in create_server_unix_socket$", "FileNotFoundError|NotADirectoryError"),
    Place(Kind.PORT, "while opening its port", _helps("a free one", "--port"),
          r"in (?:create_server_(?:unix_)?socket|setup_server|bind_socket)$",
          "OSError|PermissionError|gaierror"),
    Place(Kind.FREE_MEMORY_LOW, "while reserving memory",
          _helps("lower it to what is free", "--gpu-memory-utilization"), r"in request_memory$"),
    Place(Kind.NO_KERNEL, "because a kernel does not fit this GPU",
          _helps("another one, or a build for this GPU", "--attention-backend"),
          alone="OutOfResources|PTXASError|NoTritonConfigsError"),
    Place(Kind.UNSUPPORTED_ARCHITECTURE, "while looking for the model's code",
          _helps("upgrade vLLM and transformers"),
          r"models/registry\.py|in get_model_architecture$|/transformers/models/auto/|dynamic_module_utils\.py"
          r"|config/model_arch|transformers_utils/config\.py", _UNFIT),
    Place(Kind.UNSUPPORTED_ARCHITECTURE, "while building the model from its config.json",
          _helps("upgrade vLLM and transformers; or correct config.json, or what --hf-overrides changes of it"),
          r"model_executor/(?:layers|models)/\S*\.py\", line \d+, in (?:__init__|get_\w+|initialize_model)$",
          r"(?:Value|Key|NotImplemented)Error"),
    Place(Kind.BAD_ARGUMENT, "while checking the settings",
          _helps("change or remove the setting that the error names"),
          r"engine/arg_utils\.py|vllm/config(?:/\w+)?\.py|cli_args\.py|argparse(?:_utils)?\.py"
          r"|in (?:check_and_update_config|validate_\w*args\w*|create_engine_config)$", _REFUSES),
)  # fmt: skip
_ROWS: Final = tuple(
    (
        row,
        re.compile(row.frames),
        re.compile(row.types or ".*"),
        re.compile(row.alone),
        re.compile(row.words),
    )
    for row in PLACES
)

# In older logs the settings are checked in places of which some also run while it serves.
_STARTING: Final = re.compile(
    r"in (?:from_vllm_config|from_engine_args|create_engine_config|launch_core_engines|wait_for_engine_startup"
    r"|wait_for_ready|make_(?:async_mp_)?client|load_model|get_model|init_device|init_worker|_init_executor"
    r"|initialize_ray_cluster|_?initialize_(?:kv_cache\w*|from_config|cache)|determine_(?:available_memory"
    r"|num_available_blocks)|profile_run|_dummy\w*_run|compile_or_warm_up_model|capture_model|capture_graph"
    r"|\w*warm_?up\w*|get_kv_cache_configs?|init_app_state|build_async_engine_client\w*|make_arg_parser)$"
    r"|EngineCoreProc\(|(?:AsyncLLM|LLMEngine|LLM)\("
)
_STEPPING: Final = re.compile(
    r"in (?:run_busy_loop|_process_engine_step|step(?:_with_batch_queue|_async)?|engine_step|execute_model"
    r"|sample_tokens|worker_busy_loop|output_handler|_run_output_handler|execute_dummy_batch|run_engine_loop)$"
)


def place_of(error: Raised) -> Place | None:
    """Return what an exception is about; None where neither its type nor its frames tell."""
    name = error.name.rpartition(".")[2]
    for row, _, _, alone, words in _ROWS:
        if alone.fullmatch(name) or words.search(error.said):
            return row
    if name in _MISTAKES and not _FLAG.search(error.said):
        return None
    for frame in reversed(error.frames[-_INNERMOST:]):
        for row, frames, types, _, _ in _ROWS:
            if frames.search(frame) and types.fullmatch(name):
                return row
    return None


def when_of(frames: list[str]) -> When | None:
    """Tell by frames whether it was starting up or serving; None where they do not tell."""
    if any(_STARTING.search(each) for each in frames):
        return When.STARTUP
    return When.SERVING if any(_STEPPING.search(each) for each in frames) else None


def innermost(error: Raised) -> str:
    """Return the innermost frame in the engine's own code, short: `vllm/v1/core/sched.py in step`."""
    for frame in reversed(error.frames):
        told = re.search(r'(vllm\w*/[^"]{1,120})", line (\d+), in (\w+)', frame)
        if told and "site-packages" not in told[1]:
            return f"{told[1]}:{told[2]} in {told[3]}"
    return ""
