#include "flush_window.h"

#include <gtest/gtest.h>

#include "fake_machine.h"

namespace profiler_flush {
namespace {

constexpr pid_t kRaylet = 100;
constexpr pid_t kLauncher = 200;
constexpr pid_t kHelper = 201;
constexpr pid_t kTarget = 202;
constexpr pid_t kTee = 203;
constexpr pid_t kAgent = 300;
constexpr pid_t kStranger = 400;
const FileId kReport{1, 1};
const FileId kRayletLog{1, 2};

// The tree of nsys 2023.4.4: launcher, helper and tee in the worker's process group, the target and the agent in
// sessions of their own, the agent orphaned.
class FlushWindowTest : public ::testing::Test {
 protected:
  void SetUp() override {
    machine.Start(kRaylet, 1, "raylet", -1, -1).files[kRayletLog] = 10;
    machine.Start(kLauncher, kRaylet, "nsys", -1).files[kRayletLog] = 10;
    machine.Start(kHelper, kLauncher, "nsys-launcher");
    machine.Start(kTarget, kHelper, "ray::Actor", -1, -1);
    machine.Start(kTee, kHelper, "nsys-tee");
    machine.Start(kAgent, 1, "nsys", -1, -1).arguments = "nsys --start-agent --session-name=profile-200 --shm-name=x";
    machine.Start(kStranger, kRaylet, "ray::Other", -1, -1);
    ASSERT_TRUE(windows.Track(kTarget, kLauncher));
  }

  // Lets time pass with a step every 100 ms; each process named burns CPU all the while.
  void Pass(int64_t ms, const std::vector<pid_t> &busy = {}) {
    for (const int64_t end_ms = machine.now_ms + ms; machine.now_ms < end_ms;) {
      machine.now_ms += 100;
      for (const pid_t pid : busy) machine.At(pid).process.cpu_ms += 100;
      Step();
    }
  }
  void Step() {
    for (const pid_t launcher : windows.Step()) closed.push_back(launcher);
  }
  bool Signalled(const std::vector<pid_t> &pids) {
    for (const pid_t pid : pids) {
      if (!machine.At(pid).signals.empty()) return true;
    }
    return false;
  }
  bool Said(const std::string &words) const { return log.find(words) != std::string::npos; }

  FakeMachine machine;
  std::string log;
  std::vector<pid_t> closed;
  FlushWindows windows{Limits(), machine, machine, [this](const std::string &line) { log += line + "\n"; }};
};

TEST_F(FlushWindowTest, ArmedWhileTheTargetRuns) {
  Pass(3600 * 1000);
  EXPECT_FALSE(windows.AnyOpen());
  EXPECT_FALSE(windows.Empty());
  EXPECT_LT(windows.NextStepMs(), 0);
  EXPECT_EQ(windows.Awaited(), std::vector<pid_t>{kTarget});
  EXPECT_FALSE(Signalled({kLauncher, kHelper, kTee, kAgent, kTarget, kStranger}));
}

TEST_F(FlushWindowTest, ClosesWhenTheProfilerIsDone) {
  machine.End(kTarget);
  Pass(60 * 1000, {kAgent});
  EXPECT_TRUE(windows.AnyOpen());
  EXPECT_EQ(windows.Awaited(), std::vector<pid_t>{kLauncher});
  for (const pid_t pid : {kHelper, kTee, kAgent, kLauncher}) machine.End(pid);
  Step();
  EXPECT_TRUE(windows.Empty());
  EXPECT_EQ(closed, std::vector<pid_t>{kLauncher});
  EXPECT_FALSE(Signalled({kLauncher, kHelper, kTee, kAgent, kStranger}));
  EXPECT_TRUE(Said("worker 202 ended; waiting for nsys (pid 200)")) << log;
  EXPECT_TRUE(Said("still waiting")) << log;
  EXPECT_TRUE(Said("nsys (pid 200) is gone, 59.9 s after the window opened")) << log;
}

TEST_F(FlushWindowTest, TerminatesThenKillsWhatMakesNoProgress) {
  machine.At(kAgent).ignores_sigterm = true;
  machine.End(kTarget);
  Pass(10 * 1000);
  EXPECT_FALSE(Signalled({kLauncher, kHelper, kTee, kAgent}));
  Pass(100);
  EXPECT_TRUE(Said("made no progress for 10.0 s, the limit")) << log;
  EXPECT_FALSE(machine.Alive(kLauncher));
  EXPECT_TRUE(machine.Alive(kAgent));
  Pass(200);
  EXPECT_FALSE(machine.Alive(kAgent));
  Pass(100);
  EXPECT_TRUE(windows.Empty());
  EXPECT_EQ(machine.At(kAgent).signals, (std::vector<int>{SIGTERM, SIGKILL}));
  EXPECT_TRUE(Said("was ended")) << log;
  EXPECT_FALSE(Signalled({kStranger, kRaylet}));
}

TEST_F(FlushWindowTest, TheCapEndsEvenABusyExporter) {
  machine.End(kTarget);
  Pass(600 * 1000, {kLauncher});
  EXPECT_FALSE(Signalled({kLauncher}));
  Pass(400, {kLauncher});
  EXPECT_TRUE(windows.Empty());
  EXPECT_TRUE(Said("is not done after 600.0 s, the cap")) << log;
  for (const pid_t pid : {kLauncher, kHelper, kTee, kAgent}) EXPECT_FALSE(machine.Alive(pid)) << pid;
}

TEST_F(FlushWindowTest, ATrickleOfCpuIsNoProgress) {
  machine.End(kTarget);
  for (int i = 0; i < 12; ++i) {
    Pass(1000);
    machine.At(kAgent).process.cpu_ms += 10;
  }
  EXPECT_TRUE(windows.Empty());
}

TEST_F(FlushWindowTest, GrowingOutputIsProgress) {
  machine.End(kTarget);
  for (int i = 0; i < 10; ++i) {
    Pass(9 * 1000);
    machine.At(kAgent).files[kReport] += 4096;
  }
  EXPECT_TRUE(windows.AnyOpen());
  EXPECT_FALSE(Signalled({kLauncher, kAgent}));
}

TEST_F(FlushWindowTest, TheRayletsGrowingLogIsNoProgress) {
  machine.End(kTarget);
  machine.At(kAgent).files[kRayletLog] = 10;
  for (int i = 0; i < 11; ++i) {
    Pass(1000);
    machine.At(kLauncher).files[kRayletLog] += 100;
    machine.At(kAgent).files[kRayletLog] += 100;
  }
  EXPECT_TRUE(windows.Empty());
}

TEST_F(FlushWindowTest, ANewProcessOfTheExportCountsFromItsStart) {
  machine.End(kTarget);
  Pass(9 * 1000);
  machine.Start(204, kLauncher, "QdstrmImporter");
  Pass(20 * 1000, {204});
  EXPECT_TRUE(windows.AnyOpen());
  machine.End(204);
  Pass(10 * 1000 + 300);
  EXPECT_TRUE(windows.Empty());
}

TEST_F(FlushWindowTest, HelpersThatOutliveTheLauncherAreSweptOnceIdle) {
  machine.End(kTarget);
  Pass(1000, {kLauncher});
  machine.End(kLauncher);
  Pass(5000, {kAgent});
  EXPECT_FALSE(Signalled({kHelper, kTee, kAgent}));
  Pass(800);
  EXPECT_TRUE(windows.Empty());
  EXPECT_TRUE(Said("is gone and left idle helpers behind; terminating")) << log;
  for (const pid_t pid : {kHelper, kTee, kAgent}) EXPECT_FALSE(machine.Alive(pid)) << pid;
}

TEST_F(FlushWindowTest, ATargetThatLostItsLauncherRunsOn) {
  for (const pid_t pid : {kLauncher, kHelper, kTee, kAgent}) machine.End(pid);
  Pass(3600 * 1000);
  EXPECT_TRUE(machine.Alive(kTarget));
  EXPECT_FALSE(Signalled({kTarget}));
  machine.End(kTarget);
  Pass(100);
  EXPECT_TRUE(windows.Empty());
}

TEST_F(FlushWindowTest, TheStoppingRayletOpensEveryWindowAndItsTargetsEnd) {
  windows.OpenAll();
  EXPECT_TRUE(windows.AnyOpen());
  Pass(900);
  EXPECT_FALSE(Signalled({kLauncher, kTarget}));
  Pass(200);
  EXPECT_EQ(machine.At(kTarget).signals, std::vector<int>{SIGKILL});
  Pass(60 * 1000, {kLauncher});
  EXPECT_FALSE(Signalled({kLauncher, kHelper, kTee, kAgent}));
}

TEST_F(FlushWindowTest, TheExportBeginsWithTheTargetsEnd) {
  windows.OpenAll();
  machine.At(kTarget).ignores_sigkill = true;
  Pass(9 * 1000);
  machine.End(kTarget);
  Pass(9 * 1000);
  EXPECT_FALSE(Signalled({kLauncher}));
  Pass(1500);
  EXPECT_TRUE(windows.Empty());
}

TEST_F(FlushWindowTest, WorkAfterALongPauseIsSeenAtOnce) {
  machine.End(kTarget);
  Pass(9 * 1000);
  machine.At(kAgent).process.cpu_ms += 30;
  Pass(9 * 1000);
  EXPECT_FALSE(Signalled({kLauncher, kAgent}));
}

TEST_F(FlushWindowTest, AWorkerThatRegistersWhileTheRayletStopsHasAnOpenWindow) {
  windows.OpenAll();
  machine.Start(500, kRaylet, "nsys", -1);
  machine.Start(501, 500, "ray::Late", -1, -1);
  ASSERT_TRUE(windows.Track(501, 500));
  Pass(12 * 1000);
  EXPECT_TRUE(windows.Empty());
  EXPECT_FALSE(machine.Alive(500));
}

TEST_F(FlushWindowTest, TrackingKnowsWhoIsGoneAlready) {
  EXPECT_FALSE(windows.Track(kTarget, 999));
  machine.Start(500, kRaylet, "nsys", -1);
  ASSERT_TRUE(windows.Track(999, 500));
  EXPECT_TRUE(windows.AnyOpen());
}

TEST_F(FlushWindowTest, AnotherSessionsAgentIsAStranger) {
  machine.Start(301, 1, "nsys", -1, -1).arguments = "nsys --start-agent --session-name=profile-2001 --shm-name=x";
  machine.Start(302, 1, "nsys", -1, -1).arguments = "nsys --start-agent --session-name=mine";
  machine.End(kTarget);
  Pass(10 * 1000 + 400);
  EXPECT_TRUE(windows.Empty());
  EXPECT_FALSE(machine.Alive(kAgent));
  EXPECT_FALSE(Signalled({301, 302}));
}

TEST_F(FlushWindowTest, AnAgentOfAChosenSessionBelongs) {
  machine.Start(500, kRaylet, "nsys", -1).arguments = "nsys profile --session-new=mine -t nvtx python worker.py";
  machine.Start(501, 500, "ray::Actor", -1, -1);
  machine.Start(302, 1, "nsys", -1, -1).arguments = "nsys --start-agent --session-name=mine --shm-name=x";
  machine.Start(303, 1, "nsys", -1, -1).arguments = "nsys --start-agent --session-name=mine2 --shm-name=x";
  ASSERT_TRUE(windows.Track(501, 500));
  machine.End(501);
  Pass(20 * 1000, {302});
  EXPECT_FALSE(Signalled({500, 302}));
  Pass(10 * 1000 + 400);
  EXPECT_FALSE(machine.Alive(302));
  EXPECT_FALSE(Signalled({303, kAgent}));
}

TEST_F(FlushWindowTest, AReusedPidIsAStranger) {
  machine.End(kTarget);
  Pass(1000);
  machine.End(kAgent);
  machine.Start(kAgent, 1, "sshd", -1, -1);
  Pass(10 * 1000);
  EXPECT_FALSE(Signalled({kAgent}));
}

TEST_F(FlushWindowTest, WhatForksWhileItIsEndedIsEndedToo) {
  machine.End(kTarget);
  pid_t next = 1000;
  machine.At(kLauncher).ignores_sigterm = true;
  machine.on_signal = [&](const FakeProcess &fake, int signal) {
    if (fake.process.pid == kLauncher && signal == SIGTERM) machine.Start(next++, kLauncher, "sh").ignores_sigterm = true;
  };
  Pass(10 * 1000 + 600);
  EXPECT_TRUE(windows.Empty());
  EXPECT_EQ(next, 1001);
  EXPECT_FALSE(machine.Alive(1000));
}

TEST_F(FlushWindowTest, WhatCannotBeKilledIsLeft) {
  machine.At(kAgent).ignores_sigterm = machine.At(kAgent).ignores_sigkill = true;
  machine.End(kTarget);
  Pass(10 * 1000 + 6000);
  EXPECT_TRUE(windows.Empty());
  EXPECT_TRUE(Said("cannot kill nsys (pid 300); leaving it")) << log;
}

class SharedGroupTest : public FlushWindowTest {
 protected:
  void SetUp() override {
    FlushWindowTest::SetUp();
    machine.Start(kShared, kRaylet, "nsys", -1);
    machine.Start(kSharedHelper, kShared, "nsys-launcher");
    machine.Start(kSharedTarget, kSharedHelper, "ray::Actor");
    machine.Start(kChild, kSharedTarget, "python");
    ASSERT_TRUE(windows.Track(kSharedTarget, kShared));
  }
  static constexpr pid_t kShared = 600, kSharedHelper = 601, kSharedTarget = 602, kChild = 603;
};

TEST_F(SharedGroupTest, AGroupSignalReachesTheTargetsOnly) {
  machine.At(kChild).ignores_sigterm = true;
  windows.SignalTargets(kShared, SIGTERM);
  EXPECT_FALSE(machine.Alive(kSharedTarget));
  EXPECT_TRUE(machine.Alive(kChild));
  Step();
  EXPECT_TRUE(windows.AnyOpen());
  windows.SignalTargets(kShared, SIGKILL);  // the child is an orphan by now
  EXPECT_FALSE(machine.Alive(kChild));
  EXPECT_FALSE(Signalled({kShared, kSharedHelper, kTarget, kLauncher}));
}

TEST_F(SharedGroupTest, AnOrphanOfTheTargetInTheGroupIsATarget) {
  machine.Start(604, 1, "python", kShared);
  machine.Start(605, 1, "nsys-late", kShared);
  windows.SignalTargets(kShared, SIGTERM);
  EXPECT_FALSE(machine.Alive(604));
  EXPECT_FALSE(Signalled({605}));
}

TEST_F(SharedGroupTest, ALauncherInTheRayletsGroupDoesNotDrawItIn) {
  machine.Start(700, kRaylet, "nsys");  // isolation failed
  machine.Start(701, 700, "ray::Actor");
  ASSERT_TRUE(windows.Track(701, 700));
  machine.End(701);
  windows.SignalTargets(kRaylet, SIGTERM);
  Pass(10 * 1000 + 400);
  EXPECT_FALSE(machine.Alive(700));
  EXPECT_FALSE(Signalled({kRaylet, kStranger}));
}

}  // namespace
}  // namespace profiler_flush
