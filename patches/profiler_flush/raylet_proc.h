// What the raylet's side needs of /proc, without the C++ library: the preloaded part must not bring one.
#pragma once

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "profiler_names.h"

namespace profiler_flush {

struct ProcStat {
  int parent, group, session;
  char state;
  unsigned long user_ticks, system_ticks;
  unsigned long long start;
  char name[16];
};

inline bool ReadProcStat(pid_t pid, ProcStat *stat) {
  char path[32];
  snprintf(path, sizeof(path), "/proc/%d/stat", static_cast<int>(pid));
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  char line[1024];
  const ssize_t length = read(fd, line, sizeof(line) - 1);
  close(fd);
  if (length <= 0) return false;
  line[length] = 0;
  // The name may hold blanks and brackets: it ends at the last bracket.
  const char *open_bracket = strchr(line, '(');
  const char *close_bracket = strrchr(line, ')');
  if (!open_bracket || !close_bracket || close_bracket < open_bracket) return false;
  size_t name_length = close_bracket - open_bracket - 1;
  if (name_length >= sizeof(stat->name)) name_length = sizeof(stat->name) - 1;
  memcpy(stat->name, open_bracket + 1, name_length);
  stat->name[name_length] = 0;
  return sscanf(close_bracket + 1, " %c %d %d %d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %*d %*d %llu",
                &stat->state, &stat->parent, &stat->group, &stat->session, &stat->user_ticks, &stat->system_ticks,
                &stat->start) == 7;
}

// A zombie is dead, though /proc still lists it.
inline bool IsAlive(const ProcStat &stat) { return stat.state != 'Z' && stat.state != 'X'; }

struct Launcher {
  pid_t pid;    // 0: there is none
  pid_t group;  // 0 where it does not lead its group
};

// The profiler between the raylet and its worker: the outermost ancestor with a profiler's name.
inline Launcher FindLauncher(pid_t worker, pid_t raylet) {
  constexpr int kMaxAncestors = 32;
  Launcher launcher = {0, 0};
  ProcStat stat;
  pid_t pid = worker;
  for (int i = 0; i < kMaxAncestors && ReadProcStat(pid, &stat); ++i) {
    if (pid != worker && IsProfilerName(stat.name)) launcher = {pid, stat.group == pid ? pid : 0};
    if (stat.parent == raylet) return launcher;
    pid = stat.parent;
  }
  return {0, 0};
}

// The file that is locked while this raylet has windows, in its session's folder. False where its command line does
// not name the folder.
inline bool LockFileOfThisRaylet(char *path, size_t size) {
  const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  static char text[1 << 17];
  size_t length = 0;
  ssize_t got;
  while (length < sizeof(text) - 1 && (got = read(fd, text + length, sizeof(text) - 1 - length)) > 0) length += got;
  close(fd);
  text[length] = 0;
  constexpr char kOption[] = "--session_dir=";
  for (const char *word = text; word < text + length; word += strlen(word) + 1) {
    if (strncmp(word, kOption, strlen(kOption)) != 0) continue;
    const int needed = snprintf(path, size, "%s/profiler_flush.%d.lock", word + strlen(kOption), (int)getpid());
    return needed > 0 && static_cast<size_t>(needed) < size;
  }
  return false;
}

}  // namespace profiler_flush
