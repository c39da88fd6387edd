// The warden holds the flush windows of one stock raylet, in a process of its own so that they outlive it.
//
//     profiler_flush_warden LOCK_FILE    (socket to the raylet: file descriptor 3)
//
// It ends when the raylet stops or is gone and no window is left.

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "procfs.h"
#include "warden_protocol.h"
#include "window_lock.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace profiler_flush {

namespace {

class Warden {
 public:
  explicit Warden(const char *lock_path)
      : windows_(LimitsFromEnvironment(LogToStderr), processes_, clock_, LogToStderr), lock_(lock_path, LogToStderr) {}

  void Run() {
    while (!stopping_ || !windows_.Empty()) {
      Wait();
      Receive();
      for (const pid_t launcher : windows_.Step()) Send({MessageKind::kClosed, launcher, 0});
      lock_.Show(windows_);
    }
  }

 private:
  // Until the raylet speaks, an awaited process ends or the next step is due.
  void Wait() {
    std::vector<pollfd> polled;
    if (connected_) polled.push_back({kWardenSocket, POLLIN, 0});
    const size_t pidfds_from = polled.size();
    int64_t timeout_ms = windows_.NextStepMs();
    for (const pid_t pid : windows_.Awaited()) {
      const int pidfd = syscall(SYS_pidfd_open, pid, 0);
      if (pidfd >= 0) {
        polled.push_back({pidfd, POLLIN, 0});
      } else {
        // It is gone already, or this kernel has no pidfds and we have to look again and again.
        const int64_t look_again_ms = errno == ENOSYS ? 200 : 0;
        if (timeout_ms < 0 || timeout_ms > look_again_ms) timeout_ms = look_again_ms;
      }
    }
    poll(polled.data(), polled.size(), static_cast<int>(timeout_ms));
    for (size_t i = pidfds_from; i < polled.size(); ++i) close(polled[i].fd);
  }

  void Receive() {
    Message message;
    while (connected_) {
      const ssize_t length = recv(kWardenSocket, &message, sizeof(message), MSG_DONTWAIT);
      if (length < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (length != sizeof(message)) {
        connected_ = false;  // the raylet is gone, however it ended
        Stop();
      } else if (message.kind == MessageKind::kTrack) {
        if (!windows_.Track(message.first, message.second)) Send({MessageKind::kClosed, message.second, 0});
        lock_.Show(windows_);
      } else if (message.kind == MessageKind::kSignalTargets) {
        windows_.SignalTargets(message.first, message.second);
      } else if (message.kind == MessageKind::kStop) {
        Stop();
      }
    }
  }

  void Stop() {
    stopping_ = true;
    windows_.OpenAll();
    lock_.Show(windows_);
  }

  void Send(const Message &message) {
    if (connected_) send(kWardenSocket, &message, sizeof(message), MSG_DONTWAIT | MSG_NOSIGNAL);
  }

  ProcProcesses processes_;
  MonotonicClock clock_;
  FlushWindows windows_;
  WindowLock lock_;
  bool connected_ = true;
  bool stopping_ = false;
};

void CloseInheritedFiles() {
  DIR *fds = opendir("/proc/self/fd");
  if (!fds) return;
  std::vector<int> inherited;
  while (const dirent *entry = readdir(fds)) inherited.push_back(atoi(entry->d_name));
  closedir(fds);
  for (const int fd : inherited) {
    if (fd > kWardenSocket) close(fd);
  }
}

}  // namespace

}  // namespace profiler_flush

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s LOCK_FILE\n", argv[0]);
    return 2;
  }
  // Away from the raylet's session, terminal and files: an open socket of the raylet would hide its death from others.
  setsid();
  signal(SIGHUP, SIG_IGN);
  signal(SIGINT, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  profiler_flush::CloseInheritedFiles();
  profiler_flush::Warden(argv[1]).Run();
  return 0;
}
