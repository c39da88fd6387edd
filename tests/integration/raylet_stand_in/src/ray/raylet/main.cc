// raylet REPORT --session_dir=FOLDER
//
// Starts a profiler that leads a group with its worker in it and writes REPORT after the worker's end, registers the
// worker, and stops at once.

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

#include "ray/raylet/node_manager.h"

namespace {

// Returns the worker's pid.
pid_t StartProfiler(const char *report) {
  int ready[2];
  if (pipe(ready) != 0) return -1;
  if (fork() == 0) {
    setpgid(0, 0);
    prctl(PR_SET_NAME, "nsys");
    const pid_t worker = fork();
    if (worker == 0) {
      for (;;) pause();
    }
    if (write(ready[1], &worker, sizeof(worker)) < 0) _exit(1);
    while (kill(worker, 0) == 0) usleep(1000);
    usleep(500 * 1000);  // an export takes its time
    FILE *file = std::fopen(report, "w");
    if (!file || std::fputs("whole", file) < 0 || std::fclose(file) != 0) _exit(1);
    _exit(0);
  }
  pid_t worker = -1;
  if (read(ready[0], &worker, sizeof(worker)) != sizeof(worker)) return -1;
  return worker;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  signal(SIGCHLD, SIG_IGN);
  const pid_t worker = StartProfiler(argv[1]);
  if (worker < 0) return 1;
  stand_in::WorkerPool worker_pool;
  worker_pool.Register(worker);
  stand_in::NodeManager(worker_pool).Stop();
  return 0;
}
