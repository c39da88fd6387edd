// 1,000 made-up process trees with made-up fates. Two things must hold in each: no process of a profiler is signalled
// inside its window, and nothing that belongs to a window outlives its limits.

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "fake_machine.h"
#include "flush_window.h"

namespace profiler_flush {
namespace {

constexpr int kScenarios = 1000;
constexpr pid_t kRaylet = 100;
constexpr int64_t kTickMs = 10;

// What the scenario knows of one profiled worker; the core has to find it out.
struct Worker {
  pid_t launcher = 0;
  pid_t target = 0;
  std::set<pid_t> profilers;
  std::set<pid_t> targets;
  int64_t target_ends_ms = 0;
  int64_t launcher_killed_ms = 0;  // by somebody else; 0: never
  int64_t work_left_ms = 0;        // CPU time or writing until the report is whole
  bool writes_instead_of_burning = false;
  int64_t pause_at_ms = 0, pause_ms = 0;  // in terms of work_left_ms: a pause shorter than the limit
  bool hangs = false;                     // where the work would be done
  bool agent_stays = false;
  bool forks = false;
  pid_t exporter = 0;

  int64_t opened_ms = -1;
  int64_t worked_ms = -1;         // when it last worked
  int64_t burst_from_ms = -1;     // since when without a break
  int64_t worked_before_ms = -1;  // when it worked before that break
  int64_t launcher_gone_ms = -1;
  bool signalled = false;
};

class Scenario {
 public:
  explicit Scenario(int seed) : random_(seed) {
    limits_.idle_ms = Between(1000, 10000);
    limits_.cap_ms = Between(limits_.idle_ms, 60000);
    windows_ = std::make_unique<FlushWindows>(limits_, machine_, machine_, [](const std::string &) {});
    machine_.Start(kRaylet, 1, "raylet", -1, -1);
    for (int i = Between(0, 5); i > 0; --i) Stranger();
    for (int i = Between(1, 4); i > 0; --i) AddWorker();
    raylet_stops_ms_ = machine_.now_ms + Between(0, 20000);
    machine_.on_signal = [this](const FakeProcess &fake, int signal) { Judge(fake, signal); };
  }

  void Run() {
    const int64_t last_ms = machine_.now_ms + 30000 + limits_.cap_ms + limits_.idle_ms + 2000;
    int64_t step_ms = 0;
    while (machine_.now_ms < last_ms && !(stopped_ && windows_->Empty())) {
      machine_.now_ms += kTickMs;
      if (Chance(0.002)) Stranger();
      if (Chance(0.002)) KillSomeGroup();
      bool woken = false;
      for (Worker &worker : workers_) woken |= Live(worker);
      if (!stopped_ && machine_.now_ms >= raylet_stops_ms_) {
        stopped_ = woken = true;
        windows_->OpenAll();
        for (Worker &worker : workers_) {
          if (worker.opened_ms < 0) worker.opened_ms = machine_.now_ms;
        }
      }
      const int64_t due_ms = windows_->NextStepMs();
      if (woken || (due_ms >= 0 && machine_.now_ms - step_ms >= due_ms)) {
        windows_->Step();
        step_ms = machine_.now_ms;
      }
    }
    EXPECT_TRUE(windows_->Empty()) << "a window never closed";
    for (const Worker &worker : workers_) JudgeTheEnd(worker);
    EXPECT_TRUE(machine_.Alive(kRaylet));
  }

 private:
  int64_t Between(int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random_);
  }
  bool Chance(double share) { return std::bernoulli_distribution(share)(random_); }
  pid_t NewPid() { return next_pid_ += static_cast<pid_t>(Between(1, 3)); }

  void Stranger() {
    const bool nsys = Chance(0.3);
    const pid_t pid = NewPid();
    machine_.Start(pid, Chance(0.5) ? kRaylet : 1, nsys ? "nsys" : "ray::IDLE", -1, -1).arguments =
        nsys ? "nsys --start-agent --session-name=profile-" + std::to_string(NewPid()) : "ray::IDLE";
  }

  void AddWorker() {
    Worker worker;
    const bool own_group = Chance(0.9);
    const bool shared = own_group && Chance(0.4);
    worker.launcher = NewPid();
    machine_.Start(worker.launcher, kRaylet, "nsys", own_group ? -1 : 0);
    worker.profilers.insert(worker.launcher);
    pid_t parent = worker.launcher;
    if (Chance(0.8)) {
      parent = NewPid();
      machine_.Start(parent, worker.launcher, "nsys-launcher");
      worker.profilers.insert(parent);
    }
    worker.target = NewPid();
    machine_.Start(worker.target, parent, "ray::Actor", shared ? 0 : -1, shared ? 0 : -1);
    worker.targets.insert(worker.target);
    if (Chance(0.5)) {
      const pid_t tee = NewPid();
      machine_.Start(tee, parent, "nsys-tee");
      worker.profilers.insert(tee);
    }
    if (Chance(0.8)) {
      const pid_t agent = NewPid();
      const bool orphan = Chance(0.7);
      machine_.Start(agent, orphan ? 1 : worker.launcher, "nsys", -1, -1).arguments =
          "/opt/nsys --start-agent --session-name=profile-" + std::to_string(worker.launcher) + " --shm-name=a";
      worker.profilers.insert(agent);
    }
    for (int i = Between(0, 2); i > 0; --i) {
      const pid_t child = NewPid();
      machine_.Start(child, worker.target, "python");
      worker.targets.insert(child);
    }
    const int64_t now_ms = machine_.now_ms;
    worker.target_ends_ms = now_ms + Between(0, 25000);
    if (Chance(0.15)) worker.launcher_killed_ms = now_ms + Between(0, 40000);
    worker.work_left_ms = Chance(0.1) ? 0 : Chance(0.1) ? 1000000 : Between(10, 30000);
    worker.writes_instead_of_burning = Chance(0.4);
    worker.pause_at_ms = Between(0, worker.work_left_ms);
    worker.pause_ms = Chance(0.5) ? Between(0, limits_.idle_ms - 500) : 0;
    worker.hangs = Chance(0.25);
    worker.agent_stays = Chance(0.3);
    worker.forks = Chance(0.2);
    worker.exporter = *std::next(worker.profilers.begin(), Between(0, worker.profilers.size() - 1));
    for (const std::set<pid_t> *members : {&worker.profilers, &worker.targets}) {
      for (const pid_t pid : *members) machine_.At(pid).ignores_sigterm = Chance(0.3);
    }
    workers_.push_back(worker);
    EXPECT_TRUE(windows_->Track(worker.target, worker.launcher));
  }

  // One tick of one worker's fate. True where something ended that the core waits for.
  bool Live(Worker &worker) {
    bool woken = false;
    const int64_t now_ms = machine_.now_ms;
    if (now_ms >= worker.target_ends_ms && machine_.Alive(worker.target)) {
      machine_.End(worker.target);
      woken = true;
    }
    if (!machine_.Alive(worker.target) && worker.opened_ms < 0) {
      worker.opened_ms = now_ms;
      woken = true;
    }
    if (worker.launcher_killed_ms != 0 && now_ms >= worker.launcher_killed_ms && machine_.Alive(worker.launcher)) {
      machine_.End(worker.launcher);
    }
    if (!machine_.Alive(worker.target)) Export(worker);
    if (!machine_.Alive(worker.launcher) && worker.launcher_gone_ms < 0) {
      worker.launcher_gone_ms = now_ms;
      woken = true;
    }
    return woken;
  }

  void Export(Worker &worker) {
    if (worker.work_left_ms <= 0 && !worker.hangs && machine_.Alive(worker.exporter)) {
      for (const pid_t pid : worker.profilers) {
        if (machine_.Alive(pid) && !(worker.agent_stays && machine_.At(pid).process.session == pid)) machine_.End(pid);
      }
      return;
    }
    if (!machine_.Alive(worker.exporter) || worker.work_left_ms <= 0) return;
    if (worker.work_left_ms <= worker.pause_at_ms && worker.pause_ms > 0) {
      worker.pause_ms -= kTickMs;
      return;
    }
    if (worker.forks && worker.work_left_ms % 5000 == 0) {
      const pid_t child = NewPid();
      machine_.Start(child, worker.exporter, "QdstrmImporter");
      worker.profilers.insert(child);
    }
    FakeProcess &exporter = machine_.At(worker.exporter);
    if (worker.writes_instead_of_burning) {
      exporter.files[{1, static_cast<uint64_t>(worker.launcher)}] += 1000;
    } else {
      exporter.process.cpu_ms += kTickMs;
    }
    worker.work_left_ms -= kTickMs;
    if (machine_.now_ms - worker.worked_ms > kTickMs) {
      worker.worked_before_ms = worker.worked_ms;
      worker.burst_from_ms = machine_.now_ms;
    }
    worker.worked_ms = machine_.now_ms;
  }

  // What the raylet does with a worker's saved group.
  void KillSomeGroup() {
    const Worker &worker = workers_[Between(0, workers_.size() - 1)];
    windows_->SignalTargets(machine_.At(worker.target).process.group, Chance(0.5) ? SIGTERM : SIGKILL);
  }

  void Judge(const FakeProcess &fake, int signal) {
    const pid_t pid = fake.process.pid;
    for (Worker &worker : workers_) {
      if (worker.targets.count(pid)) return;
      if (!worker.profilers.count(pid)) continue;
      ASSERT_GE(worker.opened_ms, 0) << "signal " << signal << " before the window opened, for " << pid;
      const int64_t now_ms = machine_.now_ms;
      // Less work than this, first or last, is too little to be told from none.
      const int64_t unseen_ms = 2 * 20;
      const bool just_resumed = now_ms - worker.burst_from_ms < unseen_ms;
      const int64_t worked_ms = just_resumed ? worker.worked_before_ms : worker.worked_ms;
      const int64_t idle_ms = now_ms - std::max(worker.opened_ms, worked_ms);
      const bool launcher_gone = worker.launcher_gone_ms >= 0;
      const bool due = worker.signalled || now_ms - worker.opened_ms >= limits_.cap_ms ||
                       idle_ms >= limits_.idle_ms - unseen_ms ||
                       (launcher_gone && idle_ms >= limits_.straggler_ms - unseen_ms);
      ASSERT_TRUE(due) << "signal " << signal << " inside the window, for " << pid << ", idle for " << idle_ms
                       << ", open for " << now_ms - worker.opened_ms << " of " << limits_.cap_ms << ", launcher gone "
                       << launcher_gone;
      worker.signalled = true;
      return;
    }
    FAIL() << "signal " << signal << " for a stranger: " << fake.process.name << " " << pid;
  }

  void JudgeTheEnd(const Worker &worker) {
    for (const pid_t pid : worker.profilers) EXPECT_FALSE(machine_.Alive(pid)) << "left over: profiler's " << pid;
    if (!worker.signalled) return;
    // Past a limit the target goes too, and of its children those that were seen to be.
    EXPECT_FALSE(machine_.Alive(worker.target)) << "left over: target " << worker.target;
  }

  std::mt19937 random_;
  FakeMachine machine_;
  Limits limits_;
  std::unique_ptr<FlushWindows> windows_;
  std::vector<Worker> workers_;
  int64_t raylet_stops_ms_ = 0;
  bool stopped_ = false;
  pid_t next_pid_ = 1000;
};

TEST(Scenarios, NeverASignalInsideAWindowAndNeverASurvivor) {
  for (int seed = 0; seed < kScenarios; ++seed) {
    SCOPED_TRACE("scenario " + std::to_string(seed));
    Scenario(seed).Run();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace profiler_flush
