// The core on this machine's own processes: what /proc says is what happens.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "procfs.h"

namespace profiler_flush {
namespace {

enum class Fate { kIdle, kBurn, kWrite };

// Never returns. A pipe end that every process of the tree holds tells the test, by closing, that none is left.
[[noreturn]] void LiveOut(const char *name, Fate fate, const std::string &report) {
  prctl(PR_SET_NAME, name);
  if (fate == Fate::kIdle) {
    for (;;) pause();
  }
  const int fd = fate == Fate::kWrite ? open(report.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  for (volatile unsigned spin = 0;; ++spin) {
    if (fate == Fate::kWrite) {
      if (write(fd, "report", 6) < 0) _exit(1);
      usleep(50 * 1000);
    }
  }
}

class RealTreeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    signal(SIGCHLD, SIG_IGN);  // as in a raylet: nobody waits for the launcher
    char folder[] = "/tmp/profiler_flush_XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    folder_ = folder;
  }
  void TearDown() override {
    if (launcher_ > 0) killpg(launcher_, SIGKILL);
    if (target_ > 0) kill(target_, SIGKILL);
    if (agent_ > 0) kill(agent_, SIGKILL);
    signal(SIGCHLD, SIG_DFL);
    unlink((folder_ + "/nsys").c_str());
    unlink((folder_ + "/report.nsys-rep").c_str());
    rmdir(folder_.c_str());
  }

  // launcher "nsys" (a group of its own) with the target, and an orphaned agent in a session of its own.
  void StartTree(Fate fate, bool shared_group) {
    int pids[2], alive[2];
    ASSERT_EQ(pipe(pids), 0);
    ASSERT_EQ(pipe(alive), 0);
    launcher_ = fork();
    ASSERT_GE(launcher_, 0);
    if (launcher_ == 0) {
      setpgid(0, 0);
      close(alive[0]);
      const pid_t launcher = getpid();
      const pid_t target = fork();
      if (target == 0) {
        if (!shared_group) setsid();
        LiveOut("ray::Actor", Fate::kIdle, "");
      }
      if (fork() == 0) {
        setsid();
        const pid_t agent = fork();
        if (agent == 0) {
          setsid();
          const std::string nsys = folder_ + "/nsys";
          const std::string session = "--session-name=profile-" + std::to_string(launcher);
          if (symlink("/bin/sleep", nsys.c_str()) == 0) {
            // sleep knows no --session-name; only what ps shows matters, so that is the name it is called by.
            const std::string name = "nsys --start-agent " + session;
            execl(nsys.c_str(), name.c_str(), "1000", nullptr);
          }
          _exit(1);
        }
        if (write(pids[1], &agent, sizeof(agent)) < 0) _exit(1);
        _exit(0);
      }
      signal(SIGCHLD, SIG_DFL);
      if (write(pids[1], &target, sizeof(target)) < 0) _exit(1);
      LiveOut("nsys", fate, folder_ + "/report.nsys-rep");
    }
    close(alive[1]);
    close(pids[1]);
    alive_ = alive[0];
    pid_t got[2] = {0, 0};
    ASSERT_EQ(read(pids[0], &got[0], sizeof(pid_t)), static_cast<ssize_t>(sizeof(pid_t)));
    ASSERT_EQ(read(pids[0], &got[1], sizeof(pid_t)), static_cast<ssize_t>(sizeof(pid_t)));
    close(pids[0]);
    for (int i = 0; i < 200 && !(target_ && agent_); ++i) {
      for (const Process &process : processes_.List()) {
        if (process.pid != got[0] && process.pid != got[1]) continue;
        if (process.name == "ray::Actor") target_ = process.pid;
        if (process.name == "nsys") agent_ = process.pid;
      }
      usleep(10 * 1000);
    }
    ASSERT_GT(target_, 0);
    ASSERT_GT(agent_, 0);
    ASSERT_TRUE(windows_.Track(target_, launcher_));
  }

  bool Alive(pid_t pid) {
    for (const Process &process : processes_.List()) {
      if (process.pid == pid) return true;
    }
    return false;
  }

  // Steps as the warden does, at most limit_ms; how long it took.
  int64_t StepUntilClosed(int64_t limit_ms) {
    const int64_t from_ms = clock_.NowMs();
    while (!windows_.Empty() && clock_.NowMs() - from_ms < limit_ms) {
      windows_.Step();
      usleep(20 * 1000);
    }
    return clock_.NowMs() - from_ms;
  }

  std::string folder_;
  pid_t launcher_ = 0, target_ = 0, agent_ = 0;
  int alive_ = -1;
  std::string log_;
  ProcProcesses processes_;
  MonotonicClock clock_;
  Limits limits_ = [] {
    Limits limits;
    limits.idle_ms = 1000;
    limits.cap_ms = 4000;
    return limits;
  }();
  FlushWindows windows_{limits_, processes_, clock_, [this](const std::string &line) { log_ += line + "\n"; }};
};

TEST_F(RealTreeTest, AnIdleExporterIsEndedWithItsAgent) {
  StartTree(Fate::kIdle, false);
  windows_.Step();
  EXPECT_FALSE(windows_.AnyOpen());
  kill(target_, SIGKILL);
  const int64_t took_ms = StepUntilClosed(30000);
  EXPECT_TRUE(windows_.Empty());
  EXPECT_GE(took_ms, 900);
  EXPECT_FALSE(Alive(launcher_));
  EXPECT_FALSE(Alive(agent_));
  EXPECT_NE(log_.find("made no progress"), std::string::npos) << log_;
  char byte;
  EXPECT_EQ(read(alive_, &byte, 1), 0) << "somebody of the tree is left";
}

TEST_F(RealTreeTest, ABurningExporterIsKeptUntilTheCap) {
  StartTree(Fate::kBurn, false);
  kill(target_, SIGKILL);
  EXPECT_GE(StepUntilClosed(60000), 3900);
  EXPECT_TRUE(windows_.Empty());
  EXPECT_NE(log_.find("the cap"), std::string::npos) << log_;
  EXPECT_FALSE(Alive(launcher_));
}

TEST_F(RealTreeTest, AWritingExporterIsKeptUntilItEnds) {
  StartTree(Fate::kWrite, false);
  kill(target_, SIGKILL);
  StepUntilClosed(2500);
  ASSERT_TRUE(windows_.AnyOpen()) << log_;
  EXPECT_TRUE(Alive(launcher_));
  kill(launcher_, SIGKILL);  // it is done
  StepUntilClosed(30000);
  EXPECT_TRUE(windows_.Empty());
  EXPECT_FALSE(Alive(agent_)) << "an idle agent outlived its launcher";
}

TEST_F(RealTreeTest, AGroupSignalSparesTheExporter) {
  StartTree(Fate::kWrite, true);
  windows_.SignalTargets(launcher_, SIGKILL);
  for (int i = 0; i < 200 && Alive(target_); ++i) usleep(10 * 1000);
  EXPECT_FALSE(Alive(target_));
  windows_.Step();
  EXPECT_TRUE(windows_.AnyOpen());
  EXPECT_TRUE(Alive(launcher_));
}

TEST(ProcProcessesTest, SeesThisProcess) {
  ProcProcesses processes;
  char path[] = "/tmp/profiler_flush_XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  unlink(path);
  ASSERT_EQ(write(fd, "12345", 5), 5);
  bool found = false;
  for (const Process &process : processes.List()) {
    if (process.pid != getpid()) continue;
    found = true;
    EXPECT_EQ(process.parent, getppid());
    EXPECT_EQ(process.group, getpgid(0));
    EXPECT_EQ(process.session, getsid(0));
    EXPECT_GT(process.start, 0u);
    EXPECT_NE(processes.Arguments(process).find("real_tree_test"), std::string::npos);
    int64_t bytes = 0;
    for (const auto &[file, size] : processes.OpenFiles(process)) bytes = std::max(bytes, size == 5 ? size : 0);
    EXPECT_EQ(bytes, 5);
    Process impostor = process;
    impostor.start += 1;
    processes.Signal(impostor, SIGKILL);  // would end this test
  }
  EXPECT_TRUE(found);
  close(fd);
}

TEST(LimitsTest, ComeFromTheEnvironment) {
  std::string log;
  const Log note = [&log](const std::string &line) { log += line; };
  setenv("RAY_worker_profiler_flush_timeout_ms", "2500", 1);
  setenv("RAY_worker_profiler_flush_cap_ms", "soon", 1);
  const Limits limits = LimitsFromEnvironment(note);
  EXPECT_EQ(limits.idle_ms, 2500);
  EXPECT_EQ(limits.cap_ms, 600000);
  EXPECT_NE(log.find("RAY_worker_profiler_flush_cap_ms='soon' is not a number"), std::string::npos) << log;
  unsetenv("RAY_worker_profiler_flush_timeout_ms");
  unsetenv("RAY_worker_profiler_flush_cap_ms");
}

}  // namespace
}  // namespace profiler_flush
