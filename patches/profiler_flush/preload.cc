// The part that Ray's preload hook loads into the raylet of a stock wheel.
//
// It sees three things: a worker registering (the raylet asks for its process group), the raylet signalling a process
// group, and the raylet's exit. It tells the warden, and withholds signals from a profiler that has a window. The
// windows themselves live in the warden.
//
// Ray preloads it into other processes as well, where it does nothing. Whatever fails, it forgets its windows, and the
// raylet does what it would have done without it. It uses no C++ library: the raylet exports parts of its own, older one.

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

#include "proc_stat.h"
#include "warden_protocol.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern char **environ;

namespace profiler_flush {

namespace {

constexpr int kMaxWindows = 1024;
constexpr int kMaxAncestors = 32;

struct Window {
  pid_t launcher;
  pid_t group;  // 0 where the launcher does not lead it
};

pid_t raylet_pid;  // 0 in every process that is not a raylet
char lock_path[4096];
char warden_path[4096];

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards what follows
int warden_socket = -1;
pid_t warden_pid;
bool warden_failed;
Window windows[kMaxWindows];
int window_count;

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

void ForgetWarden() {
  if (warden_socket >= 0) close(warden_socket);
  warden_socket = -1;
  warden_failed = true;
  window_count = 0;
  Say("[profiler flush] no warden (%s): profilers are not waited for\n", strerror(errno));
}

void ForgetWindow(pid_t launcher) {
  for (int i = 0; i < window_count; ++i) {
    if (windows[i].launcher == launcher) windows[i--] = windows[--window_count];
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
    length = send(warden_socket, &message, sizeof(message), MSG_NOSIGNAL);
  } while (length < 0 && errno == EINTR);
  return length == sizeof(message);
}

bool StartWarden() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return false;
  char pid_text[16];
  snprintf(pid_text, sizeof(pid_text), "%d", static_cast<int>(raylet_pid));
  char *const arguments[] = {warden_path, pid_text, lock_path, nullptr};

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
  return true;
}

bool IsTracked(pid_t launcher) {
  for (int i = 0; i < window_count; ++i) {
    if (windows[i].launcher == launcher) return true;
  }
  return false;
}

// The profiler between the raylet and a worker: the outermost ancestor with a profiler's name; launcher 0 if none.
Window LauncherOf(pid_t worker) {
  Window found = {0, 0};
  ProcStat stat;
  pid_t pid = worker;
  for (int i = 0; i < kMaxAncestors && ReadProcStat(pid, &stat); ++i) {
    if (pid != worker && strncmp(stat.name, "nsys", 4) == 0) found = {pid, stat.group == pid ? pid : 0};
    if (stat.parent == raylet_pid) return found;
    pid = stat.parent;
  }
  return {0, 0};
}

void OnRegistered(pid_t worker) {
  const Window window = LauncherOf(worker);
  if (window.launcher == 0) return;
  pthread_mutex_lock(&mutex);
  if (warden_socket >= 0 && !Listen()) ForgetWarden();
  if (!warden_failed && !IsTracked(window.launcher) && window_count < kMaxWindows) {
    if ((warden_socket >= 0 || StartWarden()) && Tell(MessageKind::kTrack, worker, window.launcher)) {
      windows[window_count++] = window;
    } else {
      ForgetWarden();
    }
  }
  pthread_mutex_unlock(&mutex);
}

// Whether the signal was dealt with: withheld from a launcher, or passed on to the targets of its group alone.
bool Withhold(pid_t pid, bool whole_group, int signal) {
  bool withheld = false;
  pthread_mutex_lock(&mutex);
  if (warden_socket >= 0 && !Listen()) ForgetWarden();
  // Ray's clean-up of adopted orphans takes the warden for one.
  if (warden_socket >= 0 && !whole_group && pid == warden_pid) withheld = true;
  for (int i = 0; i < window_count && !withheld; ++i) {
    if (whole_group && pid == windows[i].group) {
      withheld = Tell(MessageKind::kSignalTargets, pid, signal);
      if (!withheld) ForgetWarden();
    } else if (!whole_group && pid == windows[i].launcher) {
      withheld = true;
    }
  }
  pthread_mutex_unlock(&mutex);
  return withheld;
}

// Until the warden has closed every window. It is bounded by the cap itself.
void WaitForWindows() {
  pthread_mutex_lock(&mutex);
  const int socket = warden_socket;
  warden_socket = -1;
  pthread_mutex_unlock(&mutex);
  if (socket < 0) return;
  const Message stop = {MessageKind::kStop, 0, 0};
  if (send(socket, &stop, sizeof(stop), MSG_NOSIGNAL) == sizeof(stop)) {
    Message message;
    ssize_t length;
    do {
      length = recv(socket, &message, sizeof(message), 0);
    } while (length > 0 || (length < 0 && errno == EINTR));
  }
  close(socket);
}

// The value of --name=value on this process's command line.
bool CommandLineValue(const char *option, char *value, size_t size) {
  const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  static char text[1 << 17];
  size_t length = 0;
  ssize_t got;
  while (length < sizeof(text) - 1 && (got = read(fd, text + length, sizeof(text) - 1 - length)) > 0) length += got;
  close(fd);
  text[length] = 0;
  for (const char *word = text; word < text + length; word += strlen(word) + 1) {
    if (strncmp(word, option, strlen(option)) != 0) continue;
    return snprintf(value, size, "%s", word + strlen(option)) < static_cast<int>(size);
  }
  return false;
}

__attribute__((constructor)) void OnLoad() {
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0) return;
  path[length] = 0;
  const char *name = strrchr(path, '/');
  if (!name || strcmp(name + 1, "raylet") != 0) return;

  char session_folder[3900];
  Dl_info library;
  if (!CommandLineValue("--session_dir=", session_folder, sizeof(session_folder))) {
    Say("[profiler flush] no --session_dir on the raylet's command line: profilers are not waited for\n");
    return;
  }
  if (!dladdr(reinterpret_cast<void *>(&OnLoad), &library) || !library.dli_fname) return;
  const char *slash = strrchr(library.dli_fname, '/');
  const int folder_length = slash ? static_cast<int>(slash - library.dli_fname) : 0;
  snprintf(warden_path, sizeof(warden_path), "%.*s/profiler_flush_warden", folder_length, library.dli_fname);
  snprintf(lock_path, sizeof(lock_path), "%s/profiler_flush.%d.lock", session_folder, static_cast<int>(getpid()));
  raylet_pid = getpid();
}

__attribute__((destructor)) void OnUnload() {
  if (InRaylet()) WaitForWindows();
}

}  // namespace

}  // namespace profiler_flush

// Straight to the kernel: what libc's functions of these names do, without looking up a next definition.

EXPORTED int kill(pid_t pid, int signal) noexcept {
  using namespace profiler_flush;
  if (signal != 0 && InRaylet()) {
    if (pid > 0 && Withhold(pid, false, signal)) return 0;
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
  if (InRaylet()) WaitForWindows();
  for (;;) syscall(SYS_exit_group, status);
}

EXPORTED void _Exit(int status) noexcept { _exit(status); }
