// Launchers and helpers of a profiler are known by name: nsys, nsys-launcher, nsys-tee.
#pragma once

#include <string.h>

namespace profiler_flush {

inline bool IsProfilerName(const char *name) { return strncmp(name, "nsys", 4) == 0; }

}  // namespace profiler_flush
