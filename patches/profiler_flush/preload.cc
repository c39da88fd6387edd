// The part that Ray's preload hook loads into the raylet of a stock wheel.
//
// It sees three things: a worker registering (the raylet asks for its process group), the raylet signalling a process
// group, and the raylet's exit. It tells the warden, and withholds signals from a profiler that has a window. The
// windows themselves live in the warden.
//
// Ray preloads it into other processes as well, where it does nothing. Whatever fails, it forgets its windows, and the
// raylet does what it would have done without it. It uses no C++ library: the raylet exports parts of its own, older one.

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "raylet_proc.h"
#include "warden_protocol.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern char **environ;

namespace profiler_flush {

namespace {

constexpr int kMaxWindows = 1024;

pid_t raylet_pid;  // 0 in every process that is not a raylet
char lock_path[4096];
char warden_path[4096];

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards what follows
int warden_socket = -1;
pid_t warden_pid;
bool warden_failed;
bool stopping;
Launcher launchers[kMaxWindows];  // with a window
int launcher_count;

// Also false between fork and exec in a child of the raylet.
bool InRaylet() { return raylet_pid != 0 && getpid() == raylet_pid; }

void Say(const char *format, ...) {
  char line[5000];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  if (length > 0 && write(STDERR_FILENO, line, strlen(line)) < 0) return;  // nowhere else to say it
}

void ForgetWarden(const char *why) {
  if (warden_socket >= 0) close(warden_socket);
  warden_socket = -1;
  warden_failed = true;
  launcher_count = 0;
  Say("[profiler flush] no warden (%s): profilers are not waited for\n", why);
}

void ForgetWindow(pid_t launcher) {
  for (int i = 0; i < launcher_count; ++i) {
    if (launchers[i].pid == launcher) launchers[i--] = launchers[--launcher_count];
  }
}

// Reads what the warden said. False where the warden is gone.
bool Listen() {
  Message message;
  for (;;) {
    const ssize_t length = recv(warden_socket, &message, sizeof(message), MSG_DONTWAIT);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0 && errno == EAGAIN) return true;
    if (length != sizeof(message)) return false;
    if (message.kind == MessageKind::kClosed) ForgetWindow(message.first);
  }
}

bool Tell(MessageKind kind, int32_t first, int32_t second) {
  const Message message = {kind, first, second};
  ssize_t length;
  do {
    length = send(warden_socket, &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (length < 0 && errno == EINTR);
  return length == sizeof(message);
}

// What this process's exit would do to the workers: they see their connection end, and end.
void HangUp() {
  DIR *fds = opendir("/proc/self/fd");
  if (!fds) return;
  while (const dirent *entry = readdir(fds)) {
    const int fd = atoi(entry->d_name);
    int domain = 0, type = 0;
    socklen_t size = sizeof(int);
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX &&
        getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM) {
      shutdown(fd, SHUT_RDWR);
    }
  }
  closedir(fds);
}

// Until the warden has closed every window. It is bounded by the cap itself.
void WaitForWindows() {
  pthread_mutex_lock(&mutex);
  const int socket = warden_socket;
  warden_socket = -1;
  stopping = true;
  pthread_mutex_unlock(&mutex);
  if (socket < 0) return;
  const Message stop = {MessageKind::kStop, 0, 0};
  if (send(socket, &stop, sizeof(stop), MSG_NOSIGNAL) == sizeof(stop)) {
    HangUp();
    Message message;
    ssize_t length;
    do {
      length = recv(socket, &message, sizeof(message), 0);
    } while (length > 0 || (length < 0 && errno == EINTR));
  }
  close(socket);
}

void AtExit() {
  if (InRaylet()) WaitForWindows();
}

bool StartWarden() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return false;
  char *const arguments[] = {warden_path, lock_path, nullptr};

  // The raylet's environment without this library.
  int variables = 0;
  while (environ[variables]) ++variables;
  char **environment = static_cast<char **>(calloc(variables + 1, sizeof(char *)));
  if (!environment) {
    close(ends[0]);
    close(ends[1]);
    return false;
  }
  for (int i = 0, kept = 0; i < variables; ++i) {
    if (strncmp(environ[i], "LD_PRELOAD=", 11) != 0) environment[kept++] = environ[i];
  }

  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  sigset_t none, defaults;
  sigemptyset(&none);
  sigfillset(&defaults);
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], kWardenSocket);
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  const int error = posix_spawn(&warden_pid, warden_path, &actions, &attributes, arguments, environment);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  free(environment);
  close(ends[1]);
  if (error != 0) {
    close(ends[0]);
    errno = error;
    return false;
  }
  warden_socket = ends[0];
  // Registered this late it runs before the raylet's static destructors, while its other threads can still run.
  atexit(AtExit);
  return true;
}

bool HasWindow(pid_t launcher) {
  for (int i = 0; i < launcher_count; ++i) {
    if (launchers[i].pid == launcher) return true;
  }
  return false;
}

void OnRegistered(pid_t worker) {
  const Launcher launcher = FindLauncher(worker, raylet_pid);
  if (launcher.pid == 0) return;
  pthread_mutex_lock(&mutex);
  if (warden_socket >= 0 && !Listen()) ForgetWarden("it is gone");
  if (!warden_failed && !HasWindow(launcher.pid) && launcher_count < kMaxWindows) {
    if ((warden_socket >= 0 || StartWarden()) && Tell(MessageKind::kTrack, worker, launcher.pid)) {
      launchers[launcher_count++] = launcher;
    } else {
      ForgetWarden(strerror(errno));
    }
  }
  pthread_mutex_unlock(&mutex);
}

// Whether the signal was dealt with: withheld from a launcher, or passed on to the targets of its group alone.
bool Withhold(pid_t pid, bool whole_group, int signal) {
  bool withheld = false;
  pthread_mutex_lock(&mutex);
  if (warden_socket >= 0 && !Listen()) ForgetWarden("it is gone");
  // Ray's clean-up of adopted orphans takes the warden for one.
  if (warden_socket >= 0 && !whole_group && pid == warden_pid) withheld = true;
  for (int i = 0; i < launcher_count && !withheld; ++i) {
    if (whole_group && pid == launchers[i].group) {
      withheld = stopping || Tell(MessageKind::kSignalTargets, pid, signal);
      if (!withheld) ForgetWarden(strerror(errno));
    } else if (!whole_group && pid == launchers[i].pid) {
      withheld = true;
    }
  }
  pthread_mutex_unlock(&mutex);
  return withheld;
}

__attribute__((constructor)) void OnLoad() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0) return;
  path[length] = 0;
  const char *name = strrchr(path, '/');
  if (!name || strcmp(name + 1, "raylet") != 0) return;

  if (!LockFileOfThisRaylet(lock_path, sizeof(lock_path))) {
    Say("[profiler flush] no --session_dir on the raylet's command line: profilers are not waited for\n");
    return;
  }
  Dl_info library;
  if (!dladdr(reinterpret_cast<void *>(&OnLoad), &library) || !library.dli_fname) return;
  const char *slash = strrchr(library.dli_fname, '/');
  const int folder_length = slash ? static_cast<int>(slash - library.dli_fname) : 0;
  const int needed = snprintf(warden_path, sizeof(warden_path), "%.*s/profiler_flush_warden", folder_length,
                              library.dli_fname);
  if (needed >= static_cast<int>(sizeof(warden_path))) return;
  raylet_pid = getpid();
}

}  // namespace

}  // namespace profiler_flush

// Straight to the kernel: what libc's functions of these names do, without looking up a next definition.

EXPORTED int kill(pid_t pid, int signal) noexcept {
  using namespace profiler_flush;
  if (signal != 0 && InRaylet()) {
    // A crash handler may signal the raylet itself while the mutex is held.
    if (pid > 0 && pid != raylet_pid && Withhold(pid, false, signal)) return 0;
    if (pid < -1 && Withhold(-pid, true, signal)) return 0;
  }
  return static_cast<int>(syscall(SYS_kill, pid, signal));
}

EXPORTED int killpg(pid_t group, int signal) noexcept {
  if (group < 0) {
    errno = EINVAL;
    return -1;
  }
  return kill(-group, signal);
}

EXPORTED pid_t getpgid(pid_t pid) noexcept {
  using namespace profiler_flush;
  const pid_t group = static_cast<pid_t>(syscall(SYS_getpgid, pid));
  const int error = errno;
  if (group > 0 && pid > 0 && InRaylet() && pid != raylet_pid) OnRegistered(pid);
  errno = error;
  return group;
}

EXPORTED void _exit(int status) {
  using namespace profiler_flush;
  AtExit();
  for (;;) syscall(SYS_exit_group, status);
}

EXPORTED void _Exit(int status) noexcept { _exit(status); }
