// The hooks as a raylet calls them; this test process is the raylet.

#include "raylet_hooks.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <functional>

namespace profiler_flush {
namespace {

bool Alive(pid_t pid) { return kill(pid, 0) == 0; }

void Until(const std::function<bool()> &condition) {
  for (int i = 0; i < 3000 && !condition(); ++i) usleep(10 * 1000);
  EXPECT_TRUE(condition());
}

struct Profiled {
  pid_t launcher, target;
};

// A launcher named as given that leads a group with its target in it. It burns CPU for burn_ms after the target's end,
// then it exits, or stays idle for ever where burn_ms is negative.
Profiled Start(const char *name, int burn_ms) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t launcher = fork();
  if (launcher == 0) {
    setpgid(0, 0);
    prctl(PR_SET_NAME, name);
    const pid_t target = fork();
    if (target == 0) {
      signal(SIGTERM, SIG_DFL);
      for (;;) pause();
    }
    if (write(ready[1], &target, sizeof(target)) < 0) _exit(1);
    while (kill(target, 0) == 0) usleep(1000);
    if (burn_ms < 0) {
      for (;;) pause();
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(burn_ms);
    while (std::chrono::steady_clock::now() < end) {
    }
    _exit(0);
  }
  Profiled profiled = {launcher, 0};
  EXPECT_EQ(read(ready[0], &profiled.target, sizeof(pid_t)), static_cast<ssize_t>(sizeof(pid_t)));
  return profiled;
}

// One test: the windows of a process are one instance.
TEST(RayletHooks, HoldTheWindowsOfThisProcess) {
  signal(SIGCHLD, SIG_IGN);
  setenv("RAY_worker_profiler_flush_timeout_ms", "1500", 1);
  setenv("RAY_worker_profiler_flush_cap_ms", "20000", 1);

  const Profiled plain = Start("ray::Actor", -1);
  OnWorkerRegistered(plain.target);
  EXPECT_FALSE(SignalTargetsInstead(plain.launcher, SIGTERM)) << "not profiled: as ever";
  killpg(plain.launcher, SIGKILL);

  const Profiled exporting = Start("nsys", 3000);
  const Profiled hanging = Start("nsys", -1);
  for (const Profiled &profiled : {exporting, hanging}) {
    OnWorkerRegistered(profiled.target);
    OnWorkerRegistered(profiled.target);
    EXPECT_TRUE(SignalTargetsInstead(profiled.launcher, SIGTERM));
    Until([&] { return !Alive(profiled.target); });
    EXPECT_TRUE(Alive(profiled.launcher));
  }
  EXPECT_FALSE(SignalTargetsInstead(exporting.target, SIGTERM)) << "not a launcher's group";

  const auto from = std::chrono::steady_clock::now();
  WaitForAllWindows();
  EXPECT_FALSE(Alive(exporting.launcher));
  EXPECT_FALSE(Alive(hanging.launcher));
  EXPECT_GT(std::chrono::steady_clock::now() - from, std::chrono::milliseconds(500));
  EXPECT_FALSE(SignalTargetsInstead(exporting.launcher, SIGTERM)) << "its window is closed";
  WaitForAllWindows();
}

}  // namespace
}  // namespace profiler_flush
