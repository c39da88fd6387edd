"""Tables of the Nsight Systems SQLite export, schema 3.7.2 (nsys 2023.4), as far as the kit writes them.

Source: ``nsys export --lazy=false`` of 2023.4.4 (an integration test compares them), except TARGET_INFO_CUDA_DEVICE
and DIAGNOSTIC_EVENT, which later versions write. Readers must not rely on it: other versions add, drop and reorder
columns and suffix table names.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "3.7.2"

KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNC: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
GRAPH: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CAPTURE_METADATA: Final = "META_DATA_CAPTURE"

DEVICE_KIND_KEY: Final = "DEVICE_KIND"
"""Row of META_DATA_CAPTURE that the kit adds; ``emulated`` there marks a profile no GPU made."""

_ACTIVITY = "start! end! deviceId! contextId! greenContextId streamId! correlationId globalPid"

# One column a word: INTEGER unless a type follows the colon, "!" = NOT NULL, "*" = PRIMARY KEY.
_COLUMNS: Final[dict[str, str]] = {
    "StringIds": "id*! value:TEXT!",
    KERNEL: f"{_ACTIVITY} demangledName! shortName! mangledName launchType cacheConfig registersPerThread! "
    "gridX! gridY! gridZ! blockX! blockY! blockZ! staticSharedMemory! dynamicSharedMemory! localMemoryPerThread! "
    "localMemoryTotal! gridId! sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig",
    MEMCPY: f"{_ACTIVITY} bytes! copyKind! deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId "
    "dstContextId migrationCause graphNodeId virtualAddress",
    MEMSET: f"{_ACTIVITY} value! bytes! graphNodeId memKind",
    RUNTIME: "start! end! eventClass! globalTid correlationId nameId! returnValue! callchainId",
    SYNC: f"{_ACTIVITY} syncType! eventId!",
    GRAPH: f"{_ACTIVITY} graphId! graphExecId!",
    "NVTX_EVENTS": "start! end eventType! rangeId category color text:TEXT globalTid endGlobalTid textId domainId "
    "uint64Value int64Value doubleValue:REAL uint32Value int32Value floatValue:REAL jsonTextId jsonText:TEXT",
    "TARGET_INFO_GPU": "vmId! id! name:TEXT busLocation:TEXT isDiscrete l2CacheSize totalMemory memoryBandwidth "
    "clockRate smCount pwGpuId uuid:TEXT luid chipName:TEXT cuDevice ctxswDevPath:TEXT ctrlDevPath:TEXT revision "
    "nodeMask constantMemory maxIPC maxRegistersPerBlock maxShmemPerBlock maxShmemPerBlockOptin maxShmemPerSm "
    "maxRegistersPerSm threadsPerWarp asyncEngines maxWarpsPerSm maxBlocksPerSm maxThreadsPerBlock maxBlockDimX "
    "maxBlockDimY maxBlockDimZ maxGridDimX maxGridDimY maxGridDimZ computeMajor computeMinor smMajor smMinor",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId! pid! uuid:TEXT numMultiprocessors",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime:TEXT localTime:TEXT",
    "ANALYSIS_DETAILS": "globalVid! duration! startTime! stopTime!",
    "PROCESSES": "globalPid pid name:TEXT",
    "ThreadNames": "nameId! priority globalTid",
    "DIAGNOSTIC_EVENT": "timestamp! timestampType! source! severity! text:TEXT! globalPid",
    "META_DATA_EXPORT": "name:TEXT! value:TEXT",
    CAPTURE_METADATA: "name:TEXT! value:TEXT",
}

ENUMS: Final[dict[str, list[tuple[int, str, str]]]] = {
    "ENUM_CUDA_MEMCPY_OPER": [
        (0, "CUDA_MEMCPY_KIND_UNKNOWN", "Unknown"),
        (1, "CUDA_MEMCPY_KIND_HTOD", "Host-to-Device"),
        (2, "CUDA_MEMCPY_KIND_DTOH", "Device-to-Host"),
        (3, "CUDA_MEMCPY_KIND_HTOA", "Host-to-Array"),
        (4, "CUDA_MEMCPY_KIND_ATOH", "Array-to-Host"),
        (5, "CUDA_MEMCPY_KIND_ATOA", "Array-to-Array"),
        (6, "CUDA_MEMCPY_KIND_ATOD", "Array-to-Device"),
        (7, "CUDA_MEMCPY_KIND_DTOA", "Device-to-Array"),
        (8, "CUDA_MEMCPY_KIND_DTOD", "Device-to-Device"),
        (9, "CUDA_MEMCPY_KIND_HTOH", "Host-to-Host"),
        (10, "CUDA_MEMCPY_KIND_PTOP", "Peer-to-Peer"),
        (11, "CUDA_MEMCPY_KIND_UVM_HTOD", "Unified Host-to-Device"),
        (12, "CUDA_MEMCPY_KIND_UVM_DTOH", "Unified Device-to-Host"),
        (13, "CUDA_MEMCPY_KIND_UVM_DTOD", "Unified Device-to-Device"),
    ],
    "ENUM_CUDA_MEM_KIND": [
        (0, "CUDA_MEMOPR_MEMORY_KIND_PAGEABLE", "Pageable"),
        (1, "CUDA_MEMOPR_MEMORY_KIND_PINNED", "Pinned"),
        (2, "CUDA_MEMOPR_MEMORY_KIND_DEVICE", "Device"),
        (3, "CUDA_MEMOPR_MEMORY_KIND_ARRAY", "Array"),
        (4, "CUDA_MEMOPR_MEMORY_KIND_MANAGED", "Managed"),
        (5, "CUDA_MEMOPR_MEMORY_KIND_DEVICE_STATIC", "Device Static"),
        (6, "CUDA_MEMOPR_MEMORY_KIND_MANAGED_STATIC", "Managed Static"),
        (7, "CUDA_MEMOPR_MEMORY_KIND_UNKNOWN", "Unknown"),
    ],
    "ENUM_CUPTI_SYNC_TYPE": [
        (0, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_UNKNOWN", "Unknown"),
        (1, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE", "Event sync"),
        (2, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT", "Stream wait sync"),
        (3, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE", "Stream sync"),
        (4, "CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE", "Context sync"),
    ],
    "ENUM_CUDA_KERNEL_LAUNCH_TYPE": [
        (0, "CUDA_KERNEL_LAUNCH_TYPE_UNKNOWN", "Unknown"),
        (1, "CUDA_KERNEL_LAUNCH_TYPE_REGULAR", "Regular"),
    ],
    "ENUM_NSYS_EVENT_CLASS": [
        (0, "TRACE_PROCESS_EVENT_CUDA_RUNTIME", "CUDA runtime"),
        (1, "TRACE_PROCESS_EVENT_CUDA_DRIVER", "CUDA driver"),
    ],
    "ENUM_NSYS_EVENT_TYPE": [(59, "NvtxPushPopRange", "NvtxPushPopRange")],
}


def create_table(table: str, *, name: str | None = None) -> str:
    """The CREATE TABLE statement of ``table``, under ``name`` if given."""
    parts = []
    for word in _COLUMNS[table].split():
        column, _, kind = word.rstrip("!").partition(":")
        kind = kind or "INTEGER"
        key = " PRIMARY KEY" if column.endswith("*") else ""
        parts.append(f'"{column.rstrip("*")}" {kind}{" NOT NULL" if word.endswith("!") else ""}{key}')
    return f'CREATE TABLE "{name or table}" ({", ".join(parts)})'


def create_enum(table: str) -> str:
    return f'CREATE TABLE "{table}" (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT)'
