#include "flush_window.h"

#include <signal.h>

#include <algorithm>
#include <cctype>
#include <cstdio>

#include "profiler_names.h"

namespace profiler_flush {

namespace {

// A hung exporter may still wake up for a timer now and then: this much CPU time within one period is work, less is not.
constexpr int64_t kBusyMs = 20;  // two ticks of the kernel's usual CPU clock; one may be rounding
constexpr int64_t kBusyPeriodMs = 1000;
constexpr int64_t kLogEveryMs = 10 * 1000;

using Table = std::map<pid_t, Process>;
using Members = std::map<pid_t, uint64_t>;  // pid, start

std::string Seconds(int64_t ms) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", ms / 1000.0);
  return text;
}

std::string Named(const Process &process) { return process.name + " (pid " + std::to_string(process.pid) + ")"; }

// How the command line of an agent begins to name its session: nsys calls it profile-PID after the launcher, or as the
// launcher was told to.
std::string SessionOption(const std::string &launcher_arguments, pid_t launcher) {
  constexpr char kChosen[] = "--session-new=";
  const size_t chosen = launcher_arguments.find(kChosen);
  if (chosen == std::string::npos) return "--session-name=profile-" + std::to_string(launcher);
  const size_t from = chosen + sizeof(kChosen) - 1;
  return "--session-name=" + launcher_arguments.substr(from, launcher_arguments.find(' ', from) - from);
}

bool HasOption(const std::string &arguments, const std::string &option) {
  const size_t at = arguments.find(option);
  if (at == std::string::npos) return false;
  const size_t end = at + option.size();
  return end == arguments.size() || !std::isalnum(static_cast<unsigned char>(arguments[end]));
}

Table ByPid(const std::vector<Process> &list) {
  Table table;
  for (const Process &process : list) table[process.pid] = process;
  return table;
}

const Process *Find(const Table &table, pid_t pid, uint64_t start) {
  const auto found = table.find(pid);
  return found != table.end() && found->second.start == start ? &found->second : nullptr;
}

void DropDead(Members &members, const Table &table) {
  for (auto it = members.begin(); it != members.end();) {
    it = Find(table, it->first, it->second) ? std::next(it) : members.erase(it);
  }
}

}  // namespace

class FlushWindow {
 public:
  enum class State { kArmed, kOpen, kTerminating, kKilling, kClosed };

  // A launcher that does not lead its group shares it with strangers, the raylet among them.
  FlushWindow(const Process &target, const Process &launcher, std::set<FileId> inherited_files, const Limits &limits,
              Processes &processes, const Log &log)
      : target_(target),
        launcher_(launcher),
        group_(launcher.group == launcher.pid ? launcher.group : 0),
        limits_(limits),
        processes_(processes),
        log_(log),
        inherited_files_(std::move(inherited_files)),
        session_option_(SessionOption(processes.Arguments(launcher), launcher.pid)) {
    targets_[target.pid] = target.start;
    profilers_[launcher.pid] = launcher.start;
  }

  State state() const { return state_; }
  pid_t launcher() const { return launcher_.pid; }
  pid_t group() const { return group_; }
  bool IsOpen() const { return state_ != State::kArmed && state_ != State::kClosed; }
  pid_t Awaited() const { return state_ == State::kArmed ? target_.pid : launcher_alive_ ? launcher_.pid : 0; }

  int64_t NextStepMs() const {
    if (state_ == State::kArmed) return -1;
    return state_ == State::kOpen && launcher_alive_ ? std::min<int64_t>(200, limits_.idle_ms / 10 + 1) : 20;
  }

  void Open(int64_t now_ms, const std::string &why) {
    if (state_ != State::kArmed) return;
    state_ = State::kOpen;
    opened_ms_ = progress_ms_ = logged_ms_ = now_ms;
    log_(why + "; waiting for " + Named(launcher_) + " to write its report, at most " + Seconds(limits_.idle_ms) +
         " without progress and " + Seconds(limits_.cap_ms) + " in all");
  }

  void SignalTargets(const Table &table, int signal) {
    Classify(table);
    for (const auto &[pid, start] : targets_) {
      const Process *process = Find(table, pid, start);
      if (process && process->group == group_) processes_.Signal(*process, signal);
    }
  }

  void Step(const Table &table, int64_t now_ms) {
    Classify(table);
    if (launcher_alive_ && !profilers_.count(launcher_.pid)) {
      launcher_alive_ = false;
      progress_ms_ = now_ms;  // from here on its helpers are stragglers
    }
    if (state_ == State::kArmed && !targets_.count(target_.pid)) {
      Open(now_ms, "worker " + std::to_string(target_.pid) + " ended");
    }
    if (state_ == State::kOpen) StepOpen(table, now_ms);
    if (state_ == State::kTerminating || state_ == State::kKilling) StepEnding(table, now_ms);
  }

 private:
  // Sorts every process that belongs to the window into targets and profilers. Descent decides; where a process
  // was orphaned before it was seen, the launcher's process group does, and for a daemon its command line.
  void Classify(const Table &table) {
    DropDead(targets_, table);
    DropDead(profilers_, table);
    bool grew = true;
    while (grew) {
      grew = false;
      for (const auto &[pid, process] : table) {
        if (Known(process)) continue;
        Members *members = targets_.count(process.parent)     ? &targets_
                           : profilers_.count(process.parent) ? &profilers_
                                                              : nullptr;
        if (!members) continue;
        (*members)[pid] = process.start;
        grew = true;
      }
      if (grew) continue;  // settle all descent first: an orphan's children follow the orphan
      for (const auto &[pid, process] : table) {
        if (Known(process)) continue;
        const bool in_group = group_ != 0 && process.group == group_;
        const bool named = IsProfilerName(process.name.c_str());
        const bool daemon = named && process.pid == process.session &&
                            HasOption(processes_.Arguments(process), session_option_);
        if (!in_group && !daemon) continue;
        (named ? profilers_ : targets_)[pid] = process.start;
        grew = true;
        break;
      }
    }
  }

  bool Known(const Process &process) const {
    return targets_.count(process.pid) > 0 || profilers_.count(process.pid) > 0;
  }

  void StepOpen(const Table &table, int64_t now_ms) {
    NoteProgress(table, now_ms);
    if (profilers_.empty()) {
      Close(now_ms);
      return;
    }
    // A raylet that stops does not always end its workers: some it expects to notice that it is gone.
    const Process *target = Find(table, target_.pid, target_.start);
    if (target && now_ms - opened_ms_ >= limits_.target_ms) processes_.Signal(*target, SIGKILL);
    const int64_t idle_limit_ms = launcher_alive_ ? limits_.idle_ms : limits_.straggler_ms;
    const int64_t idle_ms = now_ms - progress_ms_;
    std::string passed;
    if (now_ms - opened_ms_ >= limits_.cap_ms) {
      passed = "is not done after " + Seconds(now_ms - opened_ms_) + ", the cap";
    } else if (idle_ms >= idle_limit_ms) {
      passed = launcher_alive_ ? "made no progress for " + Seconds(idle_ms) + ", the limit"
                               : "is gone and left idle helpers behind";
    }
    if (!passed.empty()) {
      log_(Named(launcher_) + " " + passed + "; terminating " + List(table));
      state_ = State::kTerminating;
      ending_ms_ = now_ms;
      SignalAll(table, SIGTERM);
    } else if (now_ms - logged_ms_ >= kLogEveryMs) {
      logged_ms_ = now_ms;
      log_("still waiting after " + Seconds(now_ms - opened_ms_) + " for " + List(table) + ": " +
           Seconds(cpu_ms_) + " of CPU, " + std::to_string(output_bytes_ / 1000000) + " MB in open files");
    }
  }

  void StepEnding(const Table &table, int64_t now_ms) {
    if (targets_.empty() && profilers_.empty()) {
      Close(now_ms);
      return;
    }
    if (now_ms - ending_ms_ < limits_.terminate_ms) return;
    if (now_ms - ending_ms_ >= limits_.give_up_ms) {
      log_("cannot kill " + List(table) + "; leaving it");
      Close(now_ms);
      return;
    }
    if (state_ == State::kTerminating) log_("killing " + List(table));
    state_ = State::kKilling;
    SignalAll(table, SIGKILL);
  }

  // Progress is CPU time of the profiler's processes, a change of what they have written, or the target's end.
  void NoteProgress(const Table &table, int64_t now_ms) {
    std::map<FileId, int64_t> files;
    for (const auto &[pid, start] : profilers_) {
      const Process *process = Find(table, pid, start);
      int64_t &seen = cpu_seen_ms_.try_emplace({pid, start}, cpu_baseline_taken_ ? 0 : process->cpu_ms).first->second;
      cpu_ms_ += process->cpu_ms - seen;
      seen = process->cpu_ms;
      files.merge(processes_.OpenFiles(*process));
    }
    int64_t output_bytes = 0;
    for (const auto &[file, size] : files) {
      if (!inherited_files_.count(file)) output_bytes += size;
    }
    const bool busy = cpu_ms_ - cpu_at_mark_ms_ >= kBusyMs;
    const bool wrote = cpu_baseline_taken_ && output_bytes != output_bytes_;
    const bool target_ended = target_alive_ && !targets_.count(target_.pid);  // only now can the export begin
    if (busy || now_ms - mark_ms_ >= kBusyPeriodMs) {
      mark_ms_ = now_ms;
      cpu_at_mark_ms_ = cpu_ms_;
    }
    if (busy || wrote || target_ended) progress_ms_ = now_ms;
    cpu_baseline_taken_ = true;
    output_bytes_ = output_bytes;
    target_alive_ = targets_.count(target_.pid) > 0;
  }

  void SignalAll(const Table &table, int signal) {
    for (const Members *members : {&profilers_, &targets_}) {
      for (const auto &[pid, start] : *members) {
        if (const Process *process = Find(table, pid, start)) processes_.Signal(*process, signal);
      }
    }
  }

  std::string List(const Table &table) const {
    std::string text;
    for (const Members *members : {&profilers_, &targets_}) {
      for (const auto &[pid, start] : *members) {
        if (const Process *process = Find(table, pid, start)) text += (text.empty() ? "" : ", ") + Named(*process);
      }
    }
    return text;
  }

  void Close(int64_t now_ms) {
    log_(Named(launcher_) + (state_ == State::kOpen ? " is gone, " : " was ended, ") + Seconds(now_ms - opened_ms_) +
         " after the window opened");
    state_ = State::kClosed;
  }

  const Process target_;
  const Process launcher_;
  const pid_t group_;  // 0: not the launcher's alone, so being in it says nothing
  const Limits limits_;
  Processes &processes_;
  const Log &log_;
  const std::set<FileId> inherited_files_;
  const std::string session_option_;
  State state_ = State::kArmed;
  bool launcher_alive_ = true;
  bool target_alive_ = true;
  Members targets_;
  Members profilers_;
  std::map<std::pair<pid_t, uint64_t>, int64_t> cpu_seen_ms_;
  bool cpu_baseline_taken_ = false;
  int64_t cpu_ms_ = 0;  // of all profiler processes since the window opened
  int64_t output_bytes_ = 0;
  int64_t mark_ms_ = 0;  // start of the current period
  int64_t cpu_at_mark_ms_ = 0;
  int64_t progress_ms_ = 0;
  int64_t opened_ms_ = 0;
  int64_t logged_ms_ = 0;
  int64_t ending_ms_ = 0;
};

FlushWindows::FlushWindows(const Limits &limits, Processes &processes, Clock &clock, Log log)
    : limits_(limits), processes_(processes), clock_(clock), log_(std::move(log)) {}

FlushWindows::~FlushWindows() = default;

bool FlushWindows::Track(pid_t target, pid_t launcher) {
  const Table table = ByPid(processes_.List());
  const auto target_found = table.find(target);
  const auto launcher_found = table.find(launcher);
  if (launcher_found == table.end()) return false;
  Process worker;
  if (target_found != table.end()) {
    worker = target_found->second;
  } else {
    worker.pid = target;  // ended before we came to look; start 0 matches nobody, so the window opens at once
  }
  // What the launcher's parent has open, the raylet's logs, the launcher inherited: it grows without its doing.
  std::set<FileId> inherited_files;
  const auto parent = table.find(launcher_found->second.parent);
  if (parent != table.end()) {
    for (const auto &[file, size] : processes_.OpenFiles(parent->second)) inherited_files.insert(file);
  }
  windows_.push_back(std::make_unique<FlushWindow>(worker, launcher_found->second, std::move(inherited_files), limits_,
                                                   processes_, log_));
  windows_.back()->Step(table, clock_.NowMs());
  if (stopping_) windows_.back()->Open(clock_.NowMs(), "the raylet stops");
  return true;
}

void FlushWindows::OpenAll() {
  stopping_ = true;
  for (const auto &window : windows_) window->Open(clock_.NowMs(), "the raylet stops");
}

void FlushWindows::SignalTargets(pid_t group, int signal) {
  const Table table = ByPid(processes_.List());
  for (const auto &window : windows_) {
    if (window->group() == group) window->SignalTargets(table, signal);
  }
}

std::vector<pid_t> FlushWindows::Step() {
  std::vector<pid_t> closed;
  if (windows_.empty()) return closed;
  const Table table = ByPid(processes_.List());
  const int64_t now_ms = clock_.NowMs();
  for (const auto &window : windows_) {
    window->Step(table, now_ms);
    if (window->state() == FlushWindow::State::kClosed) closed.push_back(window->launcher());
  }
  windows_.erase(std::remove_if(windows_.begin(), windows_.end(),
                                [](const auto &window) { return window->state() == FlushWindow::State::kClosed; }),
                 windows_.end());
  return closed;
}

bool FlushWindows::AnyOpen() const {
  return std::any_of(windows_.begin(), windows_.end(), [](const auto &window) { return window->IsOpen(); });
}

std::vector<pid_t> FlushWindows::Awaited() const {
  std::vector<pid_t> pids;
  for (const auto &window : windows_) {
    if (window->Awaited() > 0) pids.push_back(window->Awaited());
  }
  return pids;
}

int64_t FlushWindows::NextStepMs() const {
  int64_t next_ms = -1;
  for (const auto &window : windows_) {
    const int64_t due_ms = window->NextStepMs();
    if (due_ms >= 0 && (next_ms < 0 || due_ms < next_ms)) next_ms = due_ms;
  }
  return next_ms;
}

}  // namespace profiler_flush
