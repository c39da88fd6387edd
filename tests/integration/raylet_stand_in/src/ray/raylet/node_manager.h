#pragma once

#include "ray/raylet/worker_pool.h"

namespace stand_in {

class ObjectManager {
 public:
  void Stop() {}
};

class NodeManager {
 public:
  explicit NodeManager(const WorkerPool &worker_pool) : worker_pool_(worker_pool) {}
  void Stop();

 private:
  const WorkerPool &worker_pool_;
  ObjectManager object_manager_;
};

}  // namespace stand_in
