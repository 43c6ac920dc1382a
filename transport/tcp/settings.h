// The times of the tcp backend, which tests shorten and nothing else changes, and how many sockets
// its lanes have.
//
// When a peer is gone: killed, its kernel says so at once. When its machine went down or a cable
// was cut, nothing says so; an idle connection then ends after `idle + probes * probe_pause` (30
// s), one with bytes on their way after 1 to 1.5 times `silence` (30 to 45 s). A peer that only
// takes nothing in (stopped in a debugger, busy) is waited for without limit: its kernel still
// answers. While it takes nothing in, the kernel asks up to two minutes apart, so that a cut is
// noticed later.
#pragma once

#include <chrono>
#include <cstddef>

#include <weft/transport/stream_connection.h>

namespace weft::transport::tcp {

constexpr std::size_t kMaxSockets = 16;

struct Settings {
  std::size_t sockets =
      1;  // of a lane that is connected from here (StripedStream); up to kMaxSockets
  std::chrono::seconds idle{15};        // before the kernel asks whether the peer is still there
  std::chrono::seconds probe_pause{5};  // between two such questions
  int probes = 3;                       // unanswered ones until the connection ends
  std::chrono::milliseconds silence{
      30'000};  // bytes on their way and no acknowledgement of anything
  std::chrono::milliseconds attempt{5'000};  // one address: to connect and to be greeted
  std::chrono::milliseconds first_pause{2};  // between two rounds over a peer's addresses; doubles
  std::chrono::milliseconds longest_pause{500};  // and stays so
  std::chrono::milliseconds greeting{10'000};    // what connects here and says nothing is put out
  std::chrono::milliseconds linger = kLinger;    // after a close, for the peer to end its side
  std::chrono::milliseconds shortage{
      100};  // before accepting again where descriptors or memory ran out
};

}  // namespace weft::transport::tcp
