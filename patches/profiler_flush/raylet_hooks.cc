#include "raylet_hooks.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "procfs.h"
#include "raylet_proc.h"
#include "window_lock.h"

namespace profiler_flush {

namespace {

// Empty where the raylet's session is unknown; an empty path cannot be locked.
std::string LockFile() {
  char path[4096];
  return LockFileOfThisRaylet(path, sizeof(path)) ? path : "";
}

class RayletWindows {
 public:
  // Never destroyed: the thread may outlive static destruction.
  static RayletWindows &Instance() {
    static RayletWindows *const instance = new RayletWindows();
    return *instance;
  }

  void Track(pid_t worker) {
    const Launcher launcher = FindLauncher(worker, getpid());
    if (launcher.pid == 0) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    if (groups_.count(launcher.pid) || !windows_.Track(worker, launcher.pid)) return;
    groups_[launcher.pid] = launcher.group;
    lock_.Show(windows_);
    if (!thread_started_) {
      thread_started_ = true;
      std::thread([this] { Run(); }).detach();
    }
    changed_.notify_all();
  }

  bool SignalTargets(pid_t group, int signal) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = groups_.find(group);
    if (found == groups_.end() || found->second != group) return false;
    windows_.SignalTargets(group, signal);
    changed_.notify_all();
    return true;
  }

  void WaitForAll() {
    std::unique_lock<std::mutex> guard(mutex_);
    windows_.OpenAll();
    lock_.Show(windows_);
    changed_.notify_all();
    changed_.wait(guard, [this] { return windows_.Empty(); });
  }

 private:
  void Run() {
    constexpr auto kArmedLook = std::chrono::milliseconds(200);
    std::unique_lock<std::mutex> guard(mutex_);
    for (;;) {
      if (windows_.Empty()) {
        changed_.wait(guard);
      } else if (const int64_t due_ms = windows_.NextStepMs(); due_ms >= 0) {
        changed_.wait_for(guard, std::chrono::milliseconds(due_ms));
      } else {
        // All are armed, for as long as their workers run, and nobody tells this thread of a worker's end. A step would
        // read all of /proc: look at those few processes.
        changed_.wait_for(guard, kArmedLook);
        if (windows_.NextStepMs() < 0 && AllAlive(windows_.Awaited())) continue;
      }
      for (const pid_t launcher : windows_.Step()) groups_.erase(launcher);
      lock_.Show(windows_);
      if (windows_.Empty()) changed_.notify_all();
    }
  }

  static bool AllAlive(const std::vector<pid_t> &pids) {
    return std::all_of(pids.begin(), pids.end(), [](pid_t pid) {
      ProcStat stat;
      return ReadProcStat(pid, &stat) && IsAlive(stat);
    });
  }

  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  ProcProcesses processes_;
  MonotonicClock clock_;
  FlushWindows windows_{LimitsFromEnvironment(LogToStderr), processes_, clock_, LogToStderr};
  WindowLock lock_{LockFile(), LogToStderr};
  std::map<pid_t, pid_t> groups_;  // launcher, the group that it leads or 0
  bool thread_started_ = false;
};

}  // namespace

void OnWorkerRegistered(pid_t worker) { RayletWindows::Instance().Track(worker); }

bool SignalTargetsInstead(pid_t group, int signal) { return RayletWindows::Instance().SignalTargets(group, signal); }

void WaitForAllWindows() { RayletWindows::Instance().WaitForAll(); }

}  // namespace profiler_flush
