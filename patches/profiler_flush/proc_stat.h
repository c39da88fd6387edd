// One line of /proc/PID/stat, parsed without the C++ library: the preloaded part needs it inside the raylet.
#pragma once

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

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

}  // namespace profiler_flush
