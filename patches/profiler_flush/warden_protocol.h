// What the raylet's preloaded part and its warden say to each other over a SOCK_SEQPACKET pair.
#pragma once

#include <stdint.h>

namespace profiler_flush {

constexpr int kWardenSocket = 3;  // the warden's end, by number

enum class MessageKind : int32_t {
  kTrack,          // raylet: target, launcher
  kSignalTargets,  // raylet: group, signal
  kStop,           // raylet: open every window; the warden ends once all are closed
  kClosed,         // warden: launcher, whose window closed
};

struct Message {
  MessageKind kind;
  int32_t first;
  int32_t second;
};

}  // namespace profiler_flush
