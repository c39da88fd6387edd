#include "ray/raylet/node_manager.h"

#include <signal.h>

#include <cerrno>
#include <cstdio>

namespace stand_in {

namespace {

int KillProcessGroup(pid_t pgid, int sig) { return killpg(pgid, sig) == 0 ? 0 : errno; }

#if !defined(_WIN32)
void Send(pid_t saved_pgid, int sig) {
  auto err = KillProcessGroup(saved_pgid, sig);
  std::printf("signal %d to group %d: %d\n", sig, static_cast<int>(saved_pgid), err);
}
#endif

}  // namespace

void NodeManager::Stop() {
#if !defined(_WIN32)
  for (const auto &worker : worker_pool_.Workers()) {
    Send(worker->SavedProcessGroupId(), SIGTERM);
    Send(worker->SavedProcessGroupId(), SIGKILL);
  }
#endif
  object_manager_.Stop();
}

}  // namespace stand_in
