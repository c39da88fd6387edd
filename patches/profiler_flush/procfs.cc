#include "procfs.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "raylet_proc.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

namespace profiler_flush {

namespace {

int64_t LimitFromEnvironment(const char *name, int64_t default_ms, const Log &log) {
  const char *text = getenv(name);
  if (!text) return default_ms;
  char *end = nullptr;
  errno = 0;
  const long long value = strtoll(text, &end, 10);
  if (errno == 0 && end != text && *end == 0 && value > 0) return value;
  log(std::string(name) + "='" + text + "' is not a number of milliseconds above 0; using " +
      std::to_string(default_ms));
  return default_ms;
}

}  // namespace

std::vector<Process> ProcProcesses::List() {
  static const long ticks_per_second = sysconf(_SC_CLK_TCK);
  std::vector<Process> list;
  DIR *proc = opendir("/proc");
  if (!proc) return list;
  while (const dirent *entry = readdir(proc)) {
    const pid_t pid = atoi(entry->d_name);
    ProcStat stat;
    if (pid <= 0 || !ReadProcStat(pid, &stat) || !IsAlive(stat)) continue;
    Process process;
    process.pid = pid;
    process.parent = stat.parent;
    process.group = stat.group;
    process.session = stat.session;
    process.start = stat.start;
    process.cpu_ms = static_cast<int64_t>(stat.user_ticks + stat.system_ticks) * 1000 / ticks_per_second;
    process.name = stat.name;
    list.push_back(std::move(process));
  }
  closedir(proc);
  return list;
}

std::string ProcProcesses::Arguments(const Process &process) {
  std::ifstream file("/proc/" + std::to_string(process.pid) + "/cmdline", std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::replace(text.begin(), text.end(), '\0', ' ');
  return text;
}

std::map<FileId, int64_t> ProcProcesses::OpenFiles(const Process &process) {
  std::map<FileId, int64_t> files;
  const std::string folder = "/proc/" + std::to_string(process.pid) + "/fd";
  DIR *fds = opendir(folder.c_str());
  if (!fds) return files;
  while (const dirent *entry = readdir(fds)) {
    struct stat status;
    if (fstatat(dirfd(fds), entry->d_name, &status, 0) == 0 && S_ISREG(status.st_mode)) {
      files[{status.st_dev, status.st_ino}] = status.st_size;
    }
  }
  closedir(fds);
  return files;
}

void ProcProcesses::Signal(const Process &process, int signal) {
  // The pidfd pins the process before its identity is checked. Kernels before 5.3 have none: a small race remains.
  const int pidfd = syscall(SYS_pidfd_open, process.pid, 0);
  if (pidfd < 0 && errno != ENOSYS) return;
  ProcStat stat;
  if (ReadProcStat(process.pid, &stat) && stat.start == process.start) {
    if (pidfd < 0 || (syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0) != 0 && errno == ENOSYS)) {
      kill(process.pid, signal);
    }
  }
  if (pidfd >= 0) close(pidfd);
}

int64_t MonotonicClock::NowMs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void LogToStderr(const std::string &line) {
  const std::string text = "[profiler flush] " + line + "\n";
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;  // nowhere else to say it
}

Limits LimitsFromEnvironment(const Log &log) {
  Limits limits;
  limits.idle_ms = LimitFromEnvironment("RAY_worker_profiler_flush_timeout_ms", limits.idle_ms, log);
  limits.cap_ms = LimitFromEnvironment("RAY_worker_profiler_flush_cap_ms", limits.cap_ms, log);
  return limits;
}

}  // namespace profiler_flush
