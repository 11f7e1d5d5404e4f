"""Rules about the model: where it is, whether it may be read, what it is made of.

Source: messages of vLLM (transformers_utils/config.py, models/registry.py, model_loader,
config/model.py, lora), transformers, huggingface_hub and safetensors.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from gateway.vllmlog.rules.rule import HINT, Found, Rule
from gateway.vllmlog.verdict import Advice, Kind

_PATH: Final = Advice(
    "--model", None, "a folder that exists here (check the mount), or the hub's exact name"
)
_UPGRADE: Final = Advice("", None, "upgrade vLLM and transformers")
_QUANTIZED: Final = re.compile(
    r"\.\w*(?:scales?|scale_inv|scale_2|zeros?|zero_point|qweight|absmax|quant_\w+|g_idx|deq_\w+|qweight_type)['\"]"
)
_LICENCE: Final = (
    Advice("HF_TOKEN", None, "a token of an account that may read the model"),
    Advice("", None, "accept the licence on the model's page"),
)
_TOKENIZER: Final = (
    Advice("--tokenizer", None, "the base model's tokenizer"),
    Advice("", None, "put the tokenizer's files beside the weights, or download them again"),
    Advice("", None, "the transformers version that the model was made with"),
)
_AGAIN: Final = Advice("", None, "download the checkpoint again and compare its checksums")


def _rank(found: Found) -> tuple[Advice, ...]:
    rank = int(found.number("rank") or 0)
    # Source: MaxLoRARanks of vllm/config/lora.py.
    allowed = next((each for each in (8, 16, 32, 64, 128, 256, 320, 512) if each >= rank), None)
    return (
        Advice(
            "--max-lora-rank", str(allowed) if allowed else None, f"the adapter's rank is {rank}"
        ),
    )


def _named(found: Found) -> str:
    named = next((text for key, text in found.groups.items() if key.startswith("model")), "")
    return named.strip("'\". ")


def _no_model(found: Found) -> str:
    what = _named(found) or "The model"
    return f"{what} is neither a complete model folder here nor a model on the hub."


def _another_path(found: Found) -> tuple[Advice, ...]:
    return (replace(_PATH, flag=found.flag_with(_named(found)) or _PATH.flag),)


def _of_weight(found: Found) -> Kind:
    """Tell by a weight's name whether it belongs to the quantisation."""
    return Kind.QUANTIZATION if _QUANTIZED.search(found.line.text) else Kind.WEIGHTS


def _topic(kind: Kind, words: str, remedy: Advice) -> Rule:
    """Return the last of the rules for a class: an exception that names its topic."""
    errors = "Value|Runtime|NotImplemented|Assertion|OS|FileNotFound"
    pattern = rf"^(?:\w+\.)*(?:{errors})Error: .{{0,300}}(?P<what>{words})"
    return Rule(f"topic_{kind.name.lower()}", kind, pattern, "The start failed, and the error speaks of {what}.",
                remedies=(remedy,), rank=HINT + 2)  # fmt: skip


RULES: Final[tuple[Rule, ...]] = (
    Rule("gated", Kind.MODEL_GATED,
         r"GatedRepoError|gated repo|Access to model .{1,200} is restricted|Cannot access gated|401 Client Error"
         r"|awaiting a review from the repo authors|Invalid (?:user )?token|Invalid username or password",
         "The hub requires a token of an account that has accepted this model's licence.",
         remedies=_LICENCE),
    Rule("forbidden", Kind.MODEL_GATED, r"403 (?:Client Error|Forbidden)", "The hub forbids this account the model.",
         remedies=_LICENCE, rank=1),
    Rule("model_missing", Kind.MODEL_NOT_FOUND,
         r"Invalid repository ID or local directory specified: ?'?(?P<model>[^'\s]{0,300})"
         r"|(?:Can't|Cannot) load the configuration of '?(?P<model2>[^'\s]{1,300})"
         r"|Incorrect path_or_model_id: '?(?P<model3>[^'\s]{1,300})"
         r"|^OSError: (?P<model4>\S{1,300}) (?:is not a local folder"
         r"|does not appear to have a file named config\.json)"
         r"|is not a local folder and is not a valid model identifier"
         r"|does not appear to have a file named config\.json"
         r"|No such file or directory: '(?P<model6>[^']{1,300})/config\.json'"
         r"|Error no file named|(?:Model|model) path (?P<model7>.{1,300}) (?:does not|doesn't) exist",
         _no_model, remedies=_another_path),
    Rule("model_missing_hub", Kind.MODEL_NOT_FOUND,
         r"RepositoryNotFoundError|RevisionNotFoundError|(?<!Local)EntryNotFoundError|404 Client Error"
         r"|HFValidationError(?:.{0,200}: '(?P<model>[^']{1,300})')?",
         _no_model, remedies=_another_path, rank=1),
    Rule("network", Kind.NETWORK,
         r"We couldn't connect to|Max retries exceeded with url|LocalEntryNotFoundError|OfflineModeIsEnabled"
         r"|NameResolutionError|Temporary failure in name resolution|429 Client Error|\b5\d\d Server Error"
         r"|CAS service error|CERTIFICATE_VERIFY_FAILED"
         r"|Cannot send a request, as the client has been closed"
         r"|(?:Connect|Read)Timeout.{0,60}hugging ?face|hf_xet.{0,80}(?:error|timed out)",
         "The model is not in the local cache, and the hub cannot be reached.", restart=None, rank=1,
         remedies=(Advice("HF_HOME", None, "a cache that holds the model (or download it before)"),
                   Advice("HF_HUB_OFFLINE", "1", "when the cache is complete"),
                   Advice("HF_ENDPOINT", None, "a mirror that can be reached"))),
    Rule("trust", Kind.TRUST_REMOTE_CODE,
         r"trust_remote_code=True|(?:[Pp]ass|[Ss]et|[Uu]se|[Ee]nable|option) .{0,40}--trust-remote-code"
         r"|contains custom code which must be executed",
         "The model contains its own code, which vLLM may not run without permission.",
         remedies=(Advice("--trust-remote-code", None, "only for a model whose code you trust"),)),
    Rule("inspect", Kind.UNSUPPORTED_ARCHITECTURE,
         r"Model architectures \[(?P<architecture>[^\]]{1,200})\] failed to be inspected",
         "The model's code ({architecture}) could not be loaded.", rank=2,
         remedies=(_UPGRADE,), look_at="the error above it, often a missing package"),
    Rule("architecture", Kind.UNSUPPORTED_ARCHITECTURE,
         r"Model architectures \[?(?P<architecture>[^\]]{1,200})\]? are not supported(?: for now)?",
         "This vLLM has no implementation of {architecture}.",
         remedies=(Advice("", None, "a checkpoint in a format that vLLM knows"), _UPGRADE,
                   Advice("--model-impl", "transformers", "runs it with transformers, slower"))),
    Rule("model_type", Kind.UNSUPPORTED_ARCHITECTURE,
         r"model type `(?P<architecture>[^`]{1,80})` but Transformers does not recognize"
         r"|has no vLLM implementation and|GGUF model with architecture \S{1,80} is not supported"
         r"|Unrecognized model in|Unrecognized configuration class"
         r"|Cannot find model module|(?:is|are) not (?:yet )?supported by (?:this version of )?(?:vLLM|transformers)",
         "The installed transformers does not know this model's type.",
         remedies=(Advice("", None, "pip install -U transformers"), _UPGRADE)),
    Rule("weights_file", Kind.WEIGHTS,
         r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|Error while deserializing header"
         r"|Cannot find any model weights with|PytorchStreamReader failed|invalid load key|Unexpected end of file"
         r"|not a ZIP archive|file size mismatch",
         "The checkpoint's files are missing, cut off or damaged.", restart=False,
         remedies=(_AGAIN, Advice("--load-format", None, "if the weights are of another format"))),
    Rule("weights_shape", Kind.WEIGHTS,
         r"(?:Attempted|Tried) to load weight|size mismatch for |Weight files referenced in index but missing"
         r"|Following weights were not initialized|weights were not initialized from checkpoint"
         r"|There is no module or parameter named|weight .{1,200} not found in|Missing key\(s\) in state_dict"
         r"|Unexpected key\(s\) in state_dict|loaded_weight",
         "The checkpoint's weights do not fit the model that its config describes.",
         remedies=(Advice("", None, "a checkpoint that matches config.json (and the draft model its target)"), _AGAIN),
         refine=_of_weight),
    Rule("weights_key", Kind.WEIGHTS,
         r"^KeyError: ['\"](?:(?:\w+\.)*(?:layers|model|lm_head|embed|visual|vision|language_model|blocks)\.[\w.]+"
         r"|(?:\w+\.)+(?:weight|bias|\w*scales?|q?zeros|qweight|absmax))['\"]|shape mismatch|does not match the shape",
         "The checkpoint has a weight that this implementation of the model does not know.",
         remedies=(Advice("", None, "a checkpoint, or a version of vLLM, in which they match"), _UPGRADE), rank=1,
         refine=_of_weight),
    Rule("tiktoken", Kind.TOKENIZER, r"invalid tiktoken vocab|HarmonyError",
         "The vocabulary file of the tokenizer is damaged, or could not be downloaded.",
         remedies=(Advice("TIKTOKEN_ENCODINGS_BASE", None, "a folder with good copies of the .tiktoken files"),
                   Advice("", None, "or delete the cached file, so that it is downloaded again"))),
    Rule("tokenizer", Kind.TOKENIZER,
         r"(?:Failed to load the|Can't load|Cannot load|Couldn't instantiate the backend|Error (?:loading"
         r"|initializing)) "
         r"(?:slow |fast |image |video |feature )?(?:tokenizer|processor|extractor)|Tokenizer class \S+ does not exist"
         r"|data did not match any variant of untagged enum|tokenizer\.(?:json|model|tiktoken).{0,80}(?:not found"
         r"|missing|No such file)|Error parsing line b"
         r"|Converting from (?:SentencePiece|Tiktoken)|vocab_file.{0,40}None",
         "The tokenizer's files and the installed tokenizer libraries are not compatible.", remedies=_TOKENIZER),
    Rule("tokenizer_mistake", Kind.TOKENIZER,
         r"has no attribute '?(?:all_special_tokens\w*|added_tokens\w*|is_fast|vocab_size|get_vocab\w*)"
         r"|Tokenizers?\w*'? (?:object )?has no attribute|Received an? \w{0,60}Tokenizer\w* for argument"
         r"|argument of type 'NoneType' is not iterable|^TypeError: not a string$",
         "The tokenizer's files and the installed tokenizer libraries are not compatible.", remedies=_TOKENIZER,
         sure=False),
    Rule("chat_template_file", Kind.CHAT_TEMPLATE,
         r"The supplied chat template .{0,200}appears path-like, but doesn't exist"
         r"|The supplied chat template .{0,200}(?:not exist|not found)|Failed to (?:load|open) chat template",
         "The file given as chat template does not exist.",
         remedies=(Advice("--chat-template", None, "a path that exists where the server runs"),)),
    Rule("chat_template_none", Kind.CHAT_TEMPLATE,
         r"default chat template is no longer allowed|does not define (?:a|one) chat template"
         r"|chat_template is not set|Cannot use (?:chat template|apply_chat_template)|no chat template",
         "The tokenizer has no chat template, so chat requests are refused; other requests work.",
         remedies=(Advice("--chat-template", None, "a .jinja file for this model"),),
         request=True, restart=False),
    Rule("quant_dtype", Kind.QUANTIZATION,
         r"(?P<dtype>torch\.\w+) is not supported for quantization method (?P<method>\w+)",
         "Quantisation {method} does not run with {dtype}.",
         remedies=(Advice("--dtype", "half", "what the method supports (or bfloat16)"),)),
    Rule("quant_gpu", Kind.QUANTIZATION,
         r"The quantization method (?P<method>\S+) is not supported for the current GPU"
         r"|Quantization scheme is not supported for the current GPU|Minimum capability: ?(?P<capability>\d+)",
         "This GPU is too old for the model's quantisation.",
         remedies=(Advice("--quantization", None, "a checkpoint in another quantisation for this GPU"), _UPGRADE)),
    Rule("quant_kernel", Kind.QUANTIZATION, r"Failed to find a kernel that can implement the (?P<layer>[\w ]{1,60})",
         "No kernel on this GPU can compute the checkpoint's quantised {layer}.",
         remedies=(Advice("--quantization", None, "a checkpoint in another quantisation for this GPU"), _UPGRADE)),
    Rule("quant_mismatch", Kind.QUANTIZATION,
         r"Cannot find the config file for (?P<method>\w+)|Unknown quantization method|Invalid quantization method"
         r"|Quantization method specified in the model config|quantization is currently not supported"
         r"|No quantization config found|Unsupported (?:\w{1,30} )?(?:quantization|quant_|scheme|NVFP4)"
         r"|quant_method.{0,40}not supported",
         "The requested quantisation conflicts with the checkpoint's.",
         remedies=(Advice("--quantization", None, "leave it out, or use a checkpoint of that quantisation"),)),
    Rule("quant_unsupported", Kind.QUANTIZATION,
         r"(?:FP8|NVFP4|MXFP4|AWQ|GPTQ|Marlin|Bitsandbytes|BitsAndBytes)(?!.{0,40}(?:KV|kv)).{0,80}"
         r"(?:is|are) not (?:yet )?supported",
         "This quantisation does not work here.", sure=False,
         remedies=(Advice("--quantization", None, "leave it out, or use a checkpoint of that quantisation"),)),
    Rule("dtype_old_gpu", Kind.DTYPE,
         r"Bfloat16 is only supported on GPUs with compute capability of at least [\d.]+"
         r"(?:.{0,100}has compute capability (?P<capability>[\d.]+))?",
         "This GPU cannot compute in bfloat16.",
         remedies=(Advice("--dtype", "half", "float16 works on it"),)),
    Rule("dtype_model", Kind.DTYPE,
         r"The model type '(?P<type>[^']{1,80})' does not support (?P<dtype>\w+)"
         r"|does not support (?P<dtype2>float16|bfloat16|float32)",
         "The model does not work with the requested dtype.",
         remedies=(Advice("--dtype", "bfloat16", "the dtype that it was trained in"),)),
    Rule("dtype_mixed", Kind.DTYPE,
         r"expected (?:m1 and m2 to have the same dtype|scalar type \w+ but found)"
         r"|mat1 and mat2 must have the same dtype"
         r"|Unknown dtype|Input type .{1,60} and weight type .{1,60} should be the same",
         "Parts of the model are of different dtypes.", rank=1,
         remedies=(Advice("--dtype", "auto", "the checkpoint's own dtype"),)),
    Rule("lora_rank", Kind.LORA, r"LoRA rank (?P<rank>\d+) is greater than max_lora_rank (?P<most>\d+)",
         "The adapter's rank is {rank}, the server allows {most}.", remedies=_rank),
    Rule("lora_missing", Kind.LORA,
         r"Loading lora .{1,200} failed|No adapter found for|Call to add_lora method failed"
         r"|does not support LoRA|Unsupported LoRA weight|is expected target modules|max_cpu_loras",
         "An adapter cannot be loaded.", rank=1, serving=True,
         remedies=(Advice("--lora-modules", None, "adapters whose folder exists and that fit the model"),
                   Advice("--max-lora-rank", None, "at least the adapter's rank"))),
    Rule("context_length", Kind.CONTEXT_LENGTH,
         r"maximum context length is (?P<most>\d+) tokens|the model's context length is only (?P<most2>\d+) tokens"
         r"|is longer than the maximum model length of (?P<most3>\d+)|exceeds the max_model_len (?P<most4>\d+)",
         "A request was longer than the model's context; only that request failed.",
         remedies=(Advice("", None, "the client: shorten the prompt or lower max_tokens"),
                   Advice("--max-model-len", None, "longer, if the model and the KV cache allow")),
         request=True, restart=False),
    _topic(Kind.CHAT_TEMPLATE, r"(?i:chat.template)", Advice("--chat-template", None, "a .jinja file for this model")),
    _topic(Kind.QUANTIZATION, r"(?i:quanti[sz]\w*|compressed.tensors|nvfp4|mxfp[48]|\bawq\b|gptq\w*|bitsandbytes)",
           Advice("--quantization", None, "another checkpoint, or leave it out")),
    _topic(Kind.TOKENIZER, r"(?i:\w*tokenizer\w*)", Advice("--tokenizer", None, "the base model's tokenizer")),
    _topic(Kind.LORA, r"(?i:\w*lora\w*)", Advice("--lora-modules", None, "adapters that fit the model")),
)  # fmt: skip
