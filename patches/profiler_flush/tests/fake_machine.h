// A machine of made-up processes with a clock that moves only when told to.
#pragma once

#include <signal.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "flush_window.h"

namespace profiler_flush {

struct FakeProcess {
  Process process;
  std::string arguments;
  std::map<FileId, int64_t> files;
  bool alive = true;
  bool ignores_sigterm = false;
  bool ignores_sigkill = false;  // stuck in the kernel
  std::vector<int> signals;      // what it got
};

class FakeMachine : public Processes, public Clock {
 public:
  // A session or group of 0 means the parent's; of -1 one of its own. The parent may be gone (then init adopts it).
  FakeProcess &Start(pid_t pid, pid_t parent, const std::string &name, pid_t group = 0, pid_t session = 0) {
    FakeProcess fake;
    fake.process.pid = pid;
    fake.process.parent = parent;
    fake.process.name = name;
    fake.process.start = ++starts_;
    const auto found = processes_.find(parent);
    const pid_t parent_group = found != processes_.end() ? found->second.process.group : 1;
    const pid_t parent_session = found != processes_.end() ? found->second.process.session : 1;
    fake.process.group = group == 0 ? parent_group : group == -1 ? pid : group;
    fake.process.session = session == 0 ? parent_session : session == -1 ? pid : session;
    return processes_[pid] = fake;
  }

  FakeProcess &At(pid_t pid) { return processes_.at(pid); }
  bool Alive(pid_t pid) const {
    const auto found = processes_.find(pid);
    return found != processes_.end() && found->second.alive;
  }

  void End(pid_t pid) {
    At(pid).alive = false;
    for (auto &[other, fake] : processes_) {
      if (fake.process.parent == pid) fake.process.parent = 1;
    }
  }

  std::map<pid_t, FakeProcess> &All() { return processes_; }

  std::vector<Process> List() override {
    std::vector<Process> list;
    for (const auto &[pid, fake] : processes_) {
      if (fake.alive) list.push_back(fake.process);
    }
    return list;
  }
  std::string Arguments(const Process &process) override { return At(process.pid).arguments; }
  std::map<FileId, int64_t> OpenFiles(const Process &process) override { return At(process.pid).files; }

  void Signal(const Process &process, int signal) override {
    FakeProcess &fake = At(process.pid);
    if (!fake.alive || fake.process.start != process.start) return;
    fake.signals.push_back(signal);
    if (on_signal) on_signal(fake, signal);
    if (signal == SIGKILL ? !fake.ignores_sigkill : !fake.ignores_sigterm) End(process.pid);
  }

  int64_t NowMs() override { return now_ms; }

  int64_t now_ms = 1000000;
  std::function<void(const FakeProcess &process, int signal)> on_signal;

 private:
  std::map<pid_t, FakeProcess> processes_;
  uint64_t starts_ = 0;
};

}  // namespace profiler_flush
