// The core's view of this machine: /proc, the monotonic clock, and the limits from the environment.
#pragma once

#include "flush_window.h"

namespace profiler_flush {

class ProcProcesses : public Processes {
 public:
  std::vector<Process> List() override;
  std::string Arguments(const Process &process) override;
  std::map<FileId, int64_t> OpenFiles(const Process &process) override;
  void Signal(const Process &process, int signal) override;
};

class MonotonicClock : public Clock {
 public:
  int64_t NowMs() override;
};

// One line, one write: to the raylet's error log, which Ray shows to the driver.
void LogToStderr(const std::string &line);

// RAY_worker_profiler_flush_timeout_ms and RAY_worker_profiler_flush_cap_ms, whole numbers above 0; anything else is
// reported to log and the default holds.
Limits LimitsFromEnvironment(const Log &log);

}  // namespace profiler_flush
