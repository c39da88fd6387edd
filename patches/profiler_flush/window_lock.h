// Tells ray._private.node that this raylet has windows: a file that is locked (flock) while there are any.
//
// It reads "open" once one of them is open and "armed" before. A lock ends with its holder, so that nobody waits for
// one that was killed. Only a regular file that could be locked is ever written to or removed.
#pragma once

#include <string>

#include "flush_window.h"

namespace profiler_flush {

class WindowLock {
 public:
  WindowLock(std::string path, Log log) : path_(std::move(path)), log_(std::move(log)) {}
  ~WindowLock() { Release(); }
  WindowLock(const WindowLock &) = delete;
  WindowLock &operator=(const WindowLock &) = delete;

  void Show(const FlushWindows &windows);

 private:
  bool Acquire();
  void Release();

  const std::string path_;
  const Log log_;
  int fd_ = -1;
  std::string shown_;
  bool complained_ = false;
};

}  // namespace profiler_flush
