// The core inside a raylet that is built from source: what the hooks in worker_pool.cc and node_manager.cc call.
//
// The windows live on a thread of their own and end with the raylet: where it is SIGKILLed nobody bounds a profiler that
// hangs. (On a stock wheel the warden does.) They need /proc: elsewhere than on Linux nothing is done.
#pragma once

#if !defined(_WIN32)

#include <sys/types.h>

namespace profiler_flush {

#if defined(__linux__)

// A worker registered. Where it runs under a profiler it gets a window.
void OnWorkerRegistered(pid_t worker);

// In place of killpg(group, signal). True where a profiler with a window leads the group: then only what belongs to the
// profiled worker was signalled. False: nothing was done.
bool SignalTargetsInstead(pid_t group, int signal);

// The raylet stops: opens every window and returns once all are closed.
void WaitForAllWindows();

#else

inline void OnWorkerRegistered(pid_t) {}
inline bool SignalTargetsInstead(pid_t, int) { return false; }
inline void WaitForAllWindows() {}

#endif

}  // namespace profiler_flush

#endif
