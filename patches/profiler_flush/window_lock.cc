#include "window_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace profiler_flush {

void WindowLock::Show(const FlushWindows &windows) {
  if (windows.Empty()) {
    Release();
    return;
  }
  if (fd_ < 0 && !Acquire()) {
    if (!complained_) log_("cannot lock '" + path_ + "': ray.shutdown() will not wait");
    complained_ = true;
    return;
  }
  const std::string state = windows.AnyOpen() ? "open \n" : "armed\n";  // of one length: the later replaces the earlier
  if (state != shown_ && pwrite(fd_, state.data(), state.size(), 0) > 0) shown_ = state;
}

bool WindowLock::Acquire() {
  const int fd = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) return false;
  struct stat status;
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
    for (int tries = 0; tries < 50; ++tries) {  // whoever looks whether it is locked holds it for a moment
      if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
        fd_ = fd;
        return true;
      }
      usleep(2000);
    }
  }
  close(fd);  // not ours, so not ours to remove
  return false;
}

void WindowLock::Release() {
  if (fd_ < 0) return;
  unlink(path_.c_str());
  close(fd_);
  fd_ = -1;
  shown_.clear();
}

}  // namespace profiler_flush
