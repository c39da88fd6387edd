// Keeps signals away from a profiler that is still writing its report, and bounds how long that may take.
//
// A profiled Ray worker is not the raylet's child. The profiler's launcher is, and the worker (the target) descends
// from the launcher. The report is written after the target's end, by the launcher and its helpers. The time from the
// target's end to the launcher's is the flush window:
//
//     armed        the target runs; nothing is limited
//     open         the target ended, or has to because the raylet stops; no process of the profiler is signalled
//     terminating  a limit passed: SIGTERM to everything that belongs to the window
//     killing      some of it outlived SIGTERM: SIGKILL, again at each step until nothing is left
//     closed       launcher and helpers are gone, or cannot be killed (a process stuck in the kernel)
//
// The core knows neither Ray nor the kernel: processes and time are interfaces, so that tests can fake both.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace profiler_flush {

struct Process {
  pid_t pid = 0;
  pid_t parent = 0;
  pid_t group = 0;
  pid_t session = 0;
  uint64_t start = 0;  // with pid the identity: a pid alone may by now be somebody else's
  int64_t cpu_ms = 0;  // user and system time so far
  std::string name;    // at most 15 characters, as the kernel keeps it
};

using FileId = std::pair<uint64_t, uint64_t>;  // device, inode

class Processes {
 public:
  virtual ~Processes() = default;
  // All living processes; zombies are dead.
  virtual std::vector<Process> List() = 0;
  // The words of its command line, joined by blanks.
  virtual std::string Arguments(const Process &process) = 0;
  // Size in bytes of each regular file that it has open.
  virtual std::map<FileId, int64_t> OpenFiles(const Process &process) = 0;
  // Does nothing where the pid meanwhile belongs to another process.
  virtual void Signal(const Process &process, int signal) = 0;
};

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t NowMs() = 0;  // monotonic
};

struct Limits {
  int64_t idle_ms = 10 * 1000;       // without progress while the launcher lives
  int64_t straggler_ms = 300;        // without progress of helpers that outlive the launcher
  int64_t cap_ms = 10 * 60 * 1000;   // in all, progress or not
  int64_t target_ms = 1000;          // for a target that still runs when its window opens, then SIGKILL for it alone
  int64_t terminate_ms = 200;        // from SIGTERM to SIGKILL; Ray's own delay
  int64_t give_up_ms = 5 * 1000;     // from SIGTERM to closing the window over what SIGKILL does not end
};

using Log = std::function<void(const std::string &line)>;

class FlushWindow;

// All windows of one raylet. Not thread-safe.
class FlushWindows {
 public:
  FlushWindows(const Limits &limits, Processes &processes, Clock &clock, Log log);
  ~FlushWindows();

  // A worker that runs under a profiler registered. False where one of the two is gone already.
  bool Track(pid_t target, pid_t launcher);

  // The raylet stops or is gone: every armed window opens, as will every later one.
  void OpenAll();

  // In place of killpg(group, signal): the processes of the group that belong to the target get it, those of the
  // profiler do not.
  void SignalTargets(pid_t group, int signal);

  // Looks at the processes once and does what is due. Returns the launchers whose windows closed.
  std::vector<pid_t> Step();

  bool Empty() const { return windows_.empty(); }
  bool AnyOpen() const;
  // Processes whose end is worth an immediate Step: targets of armed windows, launchers of open ones.
  std::vector<pid_t> Awaited() const;
  // Until the next Step is due where nothing awaited ends first; negative: no need to.
  int64_t NextStepMs() const;

 private:
  const Limits limits_;
  Processes &processes_;
  Clock &clock_;
  const Log log_;
  bool stopping_ = false;
  std::vector<std::unique_ptr<FlushWindow>> windows_;
};

}  // namespace profiler_flush
