// A raylet that knows as much of its workers as the flush window's hooks touch. The names that the hooks use are Ray's.
#pragma once

#include <sys/types.h>

#include <memory>
#include <vector>

namespace stand_in {

class Worker {
 public:
  void SetSavedProcessGroupId(pid_t pgid) { pgid_ = pgid; }
  pid_t SavedProcessGroupId() const { return pgid_; }

 private:
  pid_t pgid_ = -1;
};

class WorkerPool {
 public:
  void Register(pid_t pid);
  const std::vector<std::unique_ptr<Worker>> &Workers() const { return workers_; }

 private:
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace stand_in
