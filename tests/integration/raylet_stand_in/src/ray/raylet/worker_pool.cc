#include "ray/raylet/worker_pool.h"

#include <unistd.h>

namespace stand_in {

void WorkerPool::Register(pid_t pid) {
  auto worker = std::make_unique<Worker>();
#if !defined(_WIN32)
  const pid_t pgid = getpgid(pid);
  if (pgid != -1) {
    worker->SetSavedProcessGroupId(pgid);
  }
#endif
  workers_.push_back(std::move(worker));
}

}  // namespace stand_in
