// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/inproc/faults.h>
#include <weft/transport/inproc/pipe.h>

namespace weft::transport::inproc {

void Faults::hold_at(std::uint64_t position) const { pipe_->hold_at(position); }
void Faults::release() const { pipe_->hold_at(Pipe::kNever); }
void Faults::cut_at(std::uint64_t position) const {
  cut_at(position,
         Error(Blame::PeerLost, "the stream was cut at byte " + std::to_string(position)));
}
void Faults::cut_at(std::uint64_t position, const Error& why) const {
  pipe_->cut_at(position, why);
}
void Faults::corrupt(std::uint64_t position) const { pipe_->corrupt(position); }
void Faults::move_at_most(std::size_t bytes) const { pipe_->move_at_most(bytes); }
void Faults::slow_down(std::chrono::nanoseconds delay, double bytes_per_second) const {
  pipe_->slow_down(delay, bytes_per_second);
}
std::uint64_t Faults::written() const { return pipe_->written(); }

}  // namespace weft::transport::inproc
