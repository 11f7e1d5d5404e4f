"""Rules about GPUs: too few, too old, kernels that do not exist for them, faults, collectives.

Source: messages of CUDA, torch, NCCL, Triton, FlashInfer, DeepGEMM and of vLLM's platforms and
config/parallel.py.
"""

from __future__ import annotations

from typing import Final

from gateway.config.supervision import Remedy
from gateway.vllmlog.rules.rule import HINT, Found, Rule
from gateway.vllmlog.verdict import Advice, Kind

_BUILD: Final = Advice("", None, "use a build or image of vLLM (and torch) made for this GPU")
_BACKEND: Final = Advice(
    "--attention-backend", None, "choose a backend that supports this GPU and cache dtype"
)
_KV_AUTO: Final = Advice(
    "--kv-cache-dtype", "auto", "a KV cache dtype that the GPU's kernels support"
)
_OTHER_QUANT: Final = Advice(
    "--quantization", None, "another quantisation or kernel backend for this GPU"
)
_RESTART: Final = Advice("", None, "restart: a fault leaves the CUDA context unusable")
_VISIBLE: Final = Advice(
    "CUDA_VISIBLE_DEVICES", None, "make the GPUs visible (--gpus, --gres, the container's runtime)"
)

_FAULT: Final = (
    _RESTART,
    Advice("CUDA_LAUNCH_BLOCKING", "1", "once, to see which kernel it is"),
    Advice("--enforce-eager", None, "if CUDA graphs are the cause", Remedy.ENFORCE_EAGER),
    Advice("", None, "upgrade vLLM; repeated on one GPU only: take the GPU out"),
)
NCCL: Final = (
    Advice("NCCL_DEBUG", "INFO", "says which call fails"),
    Advice(
        "NCCL_P2P_DISABLE", "1", "if GPUs cannot reach each other directly", Remedy.NCCL_P2P_OFF
    ),
    Advice("--disable-custom-all-reduce", None, "the same, for vLLM's own collective"),
    Advice("", None, "restart, with the GPUs free"),
)


def _fewer_gpus(found: Found) -> tuple[Advice, ...]:
    gpus = found.number("gpus")
    why = "tensor times pipeline parallel size is at most the number of GPUs"
    value = str(int(gpus)) if gpus else None
    return (
        Advice("--tensor-parallel-size", value, why),
        _VISIBLE,
        Advice("--distributed-executor-backend", "ray", "to span several hosts"),
    )


def _world_cause(found: Found) -> str:
    return (
        f"The world size is {found.groups['world']} (tensor x pipeline parallel), but this node has "
        f"{found.groups['gpus']} GPU(s)."
    )


def _heads(found: Found) -> int:
    return int(found.number("heads") or 0)


def _split(found: Found) -> tuple[Advice, ...]:
    heads, size = (
        _heads(found),
        int(found.number("size") or found.setting("tensor_parallel_size") or 0),
    )
    most = size - 1 if size else 8
    fits = (
        next((n for n in range(min(most, heads), 0, -1) if heads % n == 0), None) if heads else None
    )
    why = (
        f"the largest size that divides {heads} heads" if fits else "a size that divides the heads"
    )
    return (Advice("--tensor-parallel-size", str(fits) if fits else None, why),)


def _split_cause(found: Found) -> str:
    size = found.groups.get("size") or "the tensor parallel size"
    return f"{_heads(found)} attention heads cannot be divided by {size}."


RULES: Final[tuple[Rule, ...]] = (
    Rule("driver_ptx", Kind.DRIVER_TOO_OLD,
         r"PTX was compiled with an unsupported toolchain|(?:cudaErrorUnsupportedPtxVersion|CUDA_ERROR_UNSUPPORTED_PTX)"
         r"|unsupported display driver|is not supported in the installed (?:CUDA )?driver|Unsupported \.version \d",
         "The kernels are newer than what this driver can translate.", restart=False,
         remedies=(Advice("", None, "upgrade the driver, or use a build for the driver's CUDA version"),)),
    Rule("driver_too_old", Kind.DRIVER_TOO_OLD,
         r"NVIDIA driver on your system is too old(?: \(found version (?P<found>\d+)\))?"
         r"|CUDA driver version is insufficient|(?:Error|error)\b.{0,300}forward compatibility was attempted",
         "The NVIDIA driver is older than this build's CUDA needs.", restart=False, rank=1,
         remedies=(Advice("", None, "upgrade the driver, or use a build for the driver's CUDA version"),)),
    Rule("world_size", Kind.NOT_ENOUGH_GPUS,
         r"World size \((?P<world>\d+)\) is larger than the number of available GPUs \((?P<gpus>\d+)\)",
         _world_cause, remedies=_fewer_gpus),
    Rule("ray_gpus", Kind.NOT_ENOUGH_GPUS,
         r"number of required \w+ exceeds the total number of available \w+|Current node has no \w+ available"
         r"|Cannot provide a placement group|placement group .{0,60}(?:timed? ?out|infeasible|cannot)"
         r"|Every node should have a unique IP|No available node types can fulfill|not enough resources in the cluster",
         "The Ray cluster has fewer GPUs than the parallel sizes need.",
         remedies=(Advice("--tensor-parallel-size", None, "no more than the cluster's GPUs"),
                   Advice("--pipeline-parallel-size", None, "the same"),
                   Advice("", None, "`ray status` shows what the cluster has"))),
    Rule("no_gpu", Kind.NOT_ENOUGH_GPUS,
         r"No (?:CUDA|HIP|ROCm|XPU|NPU|TPU|HPU)\w{0,2}(?: GPU| device)?s? (?:is|are|were) (?:available|found|visible)"
         r"|Found no NVIDIA driver|Failed to infer device type|no (?:ROCm|HIP)-capable device|hipErrorNoDevice"
         r"|Unable to initialize backend '(?:tpu|cuda|rocm|xpu)'|Can't initialize NPU"
         r"|Device string must not be empty|invalid device ordinal|no CUDA-capable device is detected"
         r"|CUDA_ERROR_NO_DEVICE|--device-ids index \d+ is out of range"
         r"|NVMLError_LibraryNotFound|NVML Shared Library Not Found",
         "No GPU, or not the one that was named, is visible to this process.",
         remedies=(_VISIBLE, Advice("VLLM_LOGGING_LEVEL", "DEBUG", "says why no platform was found")),
         look_at="nvidia-smi inside the container or job"),
    Rule("no_gpu_for_it", Kind.NOT_ENOUGH_GPUS,
         r"CUDA unknown error|devices? \(?s?\)? ?(?:is|are) busy or unavailable|local rank \d+ is out of bounds"
         r"|system not yet initialized|(?:CUDA|ROCm|XPU|NPU|TPU|HPU) is not available|device < num_gpus"
         r"|number of devices: \d.{0,80}less than|TPU initialization failed",
         "The accelerator cannot be used by this process.", remedies=(_VISIBLE,), sure=False,
         look_at="nvidia-smi inside the container or job"),
    Rule("heads", Kind.TP_NOT_DIVISIBLE,
         r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by"
         r"(?: tensor parallel size \((?P<size>\d+)\))?",
         _split_cause, remedies=_split),
    Rule("divisible", Kind.TP_NOT_DIVISIBLE,
         r"\b(?P<heads>\d{1,9}) is not divisible by (?P<size>\d{1,9})$|must be divisible by (?:the )?(?:tensor|tp)[ _]"
         r"|is not divisible by (?:weight quantization|tensor parallel|tp_size|min_thread)"
         r"|% \w{0,20}(?:tp|world)_size == 0",
         "A dimension of the model cannot be divided by the tensor parallel size.", rank=1,
         remedies=(Advice("--tensor-parallel-size", None, "a size that divides the model's dimensions"),)),
    Rule("no_kernel", Kind.NO_KERNEL,
         r"no kernel image is available|device kernel image is invalid|invalid device function|hipErrorNoBinaryForGpu"
         r"|HSA_STATUS_ERROR_INVALID_ISA|TensileLibrary|Torch not compiled with \w+ enabled"
         r"|(?:unsupported|not supported|no \w+ for).{0,60}\bgfx\d\w+|\bgfx\d\w+.{0,40}(?:is not|isn't) supported"
         r"|named symbol not found|cudaErrorNoKernelImageForDevice|no kernel found for|is not compiled for"
         r"|not compatible with the current PyTorch installation",
         "This build has no kernels for this GPU's architecture.",
         remedies=(_BUILD, _OTHER_QUANT)),
    Rule("no_backend", Kind.NO_KERNEL,
         r"No valid (?:MLA )?attention backend found for",
         "No attention backend supports this combination of GPU, head size and KV cache dtype.",
         remedies=(_KV_AUTO, _BACKEND)),
    Rule("deep_gemm", Kind.NO_KERNEL,
         r"Assertion error \(.{0,300}deep_?gemm|DeepGEMM.{0,80}not (?:supported|available)",
         "DeepGEMM has no kernel for this GPU.",
         remedies=(Advice("VLLM_USE_DEEP_GEMM", "0", "uses other kernels"), _BUILD)),
    Rule("cutlass", Kind.NO_KERNEL,
         r"cutlass_\w{1,60}.{0,200}Error Internal|cutlass\w{0,60}.{0,120}(?:not supported|not compiled)"
         r"|No compiled \w{1,60} for (?:a )?(?:CUDA device|compute) capability|Arch conditional MMA",
         "The CUTLASS kernel for this quantisation does not run on this GPU.",
         remedies=(_OTHER_QUANT, _BUILD)),
    Rule("ptxas", Kind.NO_KERNEL,
         r"ptxas.{0,40}(?:fatal|error)|is not defined for option 'gpu-name'|Unknown (?:CUDA )?arch|sm_\d+a? is not"
         r"|PTX version .{0,40}(?:not support|unsupported)|Value 'sm_\w+' is not defined",
         "The compiler that ships with this build does not know this GPU.",
         remedies=(Advice("TRITON_PTXAS_PATH", None, "a ptxas of a CUDA that knows the GPU"), _BACKEND)),
    Rule("too_old_gpu", Kind.NO_KERNEL,
         r"only supported on (?:GPUs|devices|cuda devices) with compute capability|(?:requires"
         r"|needs) (?:a GPU with )?compute capability"
         r"|(?:is|are) (?:only|not) supported (?:on|by|for) (?:this |the current )?(?:GPU|device|[Hh]opper"
         r"|[Bb]lackwell|sm)"
         r"|requires? (?:GPUs? with )?(?:SM|sm) ?_?\d\d|only supports? (?:Turing|Ampere|Ada|Hopper|Blackwell)"
         r"|Unsupported (?:GPU|CUDA|compute) (?:arch|capability)|not supported on (?:compute capability|SM ?\d)",
         "A requested feature does not exist for this GPU's compute capability.", rank=1,
         remedies=(_BUILD, _OTHER_QUANT, _BACKEND)),
    Rule("memory_fault", Kind.CUDA_FAULT,
         r"illegal memory access|device-side assert|misaligned address|unspecified launch failure"
         r"|uncorrectable (?:NVLink|ECC)|illegal instruction was encountered|HSA_STATUS_ERROR(?!_INVALID_ISA)"
         r"|UR_RESULT_ERROR_DEVICE_LOST|aicore exception|vector core exception|error code:? ?(?:is )?5070\d\d"
         r"|Memory access fault by GPU|an illegal .{1,40} was encountered|hardware stack error",
         "A kernel on the GPU faulted; the CUDA context is lost.",
         remedies=_FAULT, serving=True, restart=True, look_at="dmesg for Xid messages of the GPU"),
    Rule("cublas", Kind.CUDA_FAULT,
         r"(?:CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS|ROCBLAS)_STATUS_(?!ALLOC)\w+|CUDNN_STATUS_\w+"
         r"|\b(?:CUDA|HIP|XPU|NPU) error: (?!out of)|UR_RESULT_ERROR_(?!OUT_OF)\w+",
         "A call into CUDA failed.", remedies=_FAULT, serving=True, restart=True, rank=1),
    Rule("device_runtime", Kind.OTHER,
         r"\bERR\d{5}\b|\bE[EZ]\d{4}[:!]|call acl api failed|(?:[Ll]evel_?[Zz]ero|UR|ZE) (?:backend )?(?:failed|error)",
         "A call into the accelerator's runtime failed.", serving=True, rank=1,
         remedies=(Advice("", None, "look for the error code in the accelerator's own log"), _BUILD)),
    Rule("nccl", Kind.NCCL,
         r"NCCL (?:error|Error)[: ]|nccl(?:UnhandledCuda|System|Internal|Remote|InvalidUsage|InvalidArgument)Error"
         r"|ncclCommInitRank failed|RCCL error|HCCL (?:function )?error|hccl\w{0,40}(?: failed|.{0,20}error code)"
         r"|call hccl api failed|CCL_ERROR|oneCCL.{0,80}(?:error|fail)",
         "NCCL could not connect the GPUs, or lost one.", remedies=NCCL, serving=True, restart=True,
         look_at="NCCL_DEBUG=INFO; a GPU that is full fails here too"),
    Rule("nccl_watchdog", Kind.NCCL,
         r"Watchdog caught collective operation timeout|collective operation timeout|Watchdog thread terminated"
         r"|\[c10d\].{0,120}timed out|DistBackendError|Some NCCL operations have failed or timed out",
         "A collective between the GPUs did not finish in time.", serving=True, restart=True, rank=1,
         even_stopped=True,
         remedies=(NCCL[3], NCCL[1], NCCL[2],
                   Advice("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "to see which collective hangs"))),
    Rule("peers_gone", Kind.NCCL,
         r"TCPStore server has shut down too early|(?:recvValue|recvBytes|sendBytes) failed on SocketImpl",
         "The process that all others meet at is gone.", serving=True, restart=True, rank=HINT + 1, any_level=True,
         remedies=(Advice("", None, "look at the log of rank 0, on the head node: it ended first"), NCCL[3])),
    Rule("rendezvous", Kind.NCCL,
         r"DistNetworkError|The client socket has (?:failed|timed out)|Connection closed by peer"
         r"|Gloo connectFullMesh failed"
         r"|setting up NCCL communicator|cudaIpc\w+ failed|TCPStore: |[Ff]ailed to connect to (?:master|TCPStore)"
         r"|DistStoreError|wait timeout after \d+ms|gloo/transport/",
         "The processes of the engine lost the connection to each other.", restart=True, rank=1, serving=True,
         remedies=(Advice("VLLM_HOST_IP", None, "the address that the other processes reach"),
                   Advice("NCCL_SOCKET_IFNAME", None, "the network interface between them"),
                   Advice("GLOO_SOCKET_IFNAME", None, "the same for gloo"))),
)  # fmt: skip
