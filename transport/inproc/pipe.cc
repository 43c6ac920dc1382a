// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <utility>

#include <weft/base/mutex.h>
#include <weft/transport/inproc/pipe.h>

namespace weft::transport::inproc {

Notice::Notice(EventLoop& loop, std::function<void()> call) : state_(std::make_shared<State>()) {
  state_->loop = &loop;
  state_->call = std::move(call);
}

void Notice::post() const {
  MutexLock lock(state_->mutex);
  if (!state_->loop) return;
  state_->loop->post([state = state_] {
    {
      MutexLock again(state->mutex);
      if (!state->loop) return;
    }
    state->call();
  });
}

EventLoop::Registration Notice::post_at(Deadline time) const {
  MutexLock lock(state_->mutex);
  if (!state_->loop) return {};
  return state_->loop->at(time, Task([state = state_] {
                            {
                              MutexLock again(state->mutex);
                              if (!state->loop) return;
                            }
                            state->call();
                          }));
}

void Notice::stop() noexcept {
  MutexLock lock(state_->mutex);
  state_->loop = nullptr;
}

std::size_t Pipe::write(std::span<const Bytes> pieces) {
  MutexLock lock(mutex_);
  std::size_t room = std::min(ring_.size() - static_cast<std::size_t>(tail_ - head_), at_most_);
  if (deaf_ || finished_) room = 0;
  std::size_t written = 0;
  std::size_t offered = 0;
  for (const Bytes& piece : pieces) {
    offered += piece.size();
    const std::size_t part = std::min(piece.size(), room - written);
    put(piece.first(part));
    written += part;
  }
  travel(tail_ - written);
  if (written > 0) travelling_.empty() ? tell_reader() : tell_of_arrival();
  if (written < offered) {
    writer_waits_ = true;
    if (deaf_ || (written > 0 && written == at_most_))
      tell_writer();  // there is room, or never will be
  }
  return written;
}

void Pipe::put(Bytes bytes) {
  while (!bytes.empty()) {
    const std::size_t at = static_cast<std::size_t>(tail_ % ring_.size());
    const std::size_t part = std::min(bytes.size(), ring_.size() - at);
    std::memcpy(&ring_[at], bytes.data(), part);
    for (const std::uint64_t position : corrupted_) {
      if (position >= tail_ && position - tail_ < part)
        ring_[at + static_cast<std::size_t>(position - tail_)] ^= std::byte{0xff};
    }
    tail_ += part;
    bytes = bytes.subspan(part);
  }
}

// Bytes travel in pieces, so that there is room again before all have arrived.
void Pipe::travel(std::uint64_t from) {
  if (delay_.count() == 0 && bytes_per_second_ == 0) return;
  const std::uint64_t piece = std::max<std::uint64_t>(ring_.size() / 16, 1);
  sent_ = std::max(sent_, Deadline::Clock::now());
  if (travelling_.empty()) come_ = from;
  while (from < tail_) {
    const std::uint64_t part = std::min(tail_ - from, piece);
    from += part;
    if (bytes_per_second_ > 0) {
      sent_ += std::chrono::nanoseconds(
          static_cast<std::int64_t>(1e9 * static_cast<double>(part) / bytes_per_second_));
    }
    travelling_.push_back({from, sent_ + delay_});
  }
}

std::uint64_t Pipe::arrived() const {
  if (travelling_.empty()) return tail_;
  const auto now = Deadline::Clock::now();
  while (!travelling_.empty() && travelling_.front().comes <= now) {
    come_ = travelling_.front().end;
    travelling_.pop_front();
  }
  return travelling_.empty() ? tail_ : come_;
}

void Pipe::reader_waits() {
  reader_waits_ = true;
  tell_of_arrival();
}

void Pipe::tell_of_arrival() {
  if (!reader_ || !reader_waits_ || travelling_.empty() || travelling_.front().comes == arrival_at_)
    return;
  arrival_at_ = travelling_.front().comes;
  arrival_ = reader_->post_at(Deadline::at(arrival_at_));
}

void Pipe::slow_down(std::chrono::nanoseconds delay, double bytes_per_second) {
  MutexLock lock(mutex_);
  delay_ = delay;
  bytes_per_second_ = bytes_per_second;
}

void Pipe::finish(const Error& why) {
  MutexLock lock(mutex_);
  if (!finished_) finished_ = why;
  tell_reader();
}

void Pipe::on_room(std::optional<Notice> notice) {
  MutexLock lock(mutex_);
  writer_ = std::move(notice);
}

std::optional<Error> Pipe::deaf() const {
  MutexLock lock(mutex_);
  return deaf_;
}

Pipe::Bytes Pipe::peek(std::size_t wanted) {
  MutexLock lock(mutex_);
  const auto come =
      std::min(static_cast<std::size_t>(visible() - std::min(visible(), head_)), at_most_);
  if (come < wanted) reader_waits();
  const std::size_t at = static_cast<std::size_t>(head_ % ring_.size());
  const std::size_t contiguous = std::min(come, ring_.size() - at);
  if (contiguous >= std::min(wanted, come)) return {&ring_[at], contiguous};
  const std::size_t shown = std::min(wanted, come);
  copy_from_ring(std::span(window_).first(shown));
  return Bytes(window_).first(shown);
}

void Pipe::copy_from_ring(std::span<std::byte> to) const {
  const std::size_t at = static_cast<std::size_t>(head_ % ring_.size());
  const std::size_t first = std::min(to.size(), ring_.size() - at);
  if (first > 0) std::memcpy(to.data(), &ring_[at], first);
  if (first < to.size()) std::memcpy(to.data() + first, ring_.data(), to.size() - first);
}

void Pipe::consume(std::size_t bytes) {
  MutexLock lock(mutex_);
  head_ += bytes;
  tell_of_room();
}

std::size_t Pipe::read(std::span<std::byte> to) {
  MutexLock lock(mutex_);
  const auto come = static_cast<std::size_t>(visible() - std::min(visible(), head_));
  const std::size_t count = std::min({to.size(), come, at_most_});
  copy_from_ring(to.first(count));
  head_ += count;
  tell_of_room();
  if (count < to.size()) reader_waits();
  return count;
}

std::size_t Pipe::window() const {
  MutexLock lock(mutex_);
  return std::min(ring_.size(), at_most_);
}

std::optional<Error> Pipe::end() const {
  MutexLock lock(mutex_);
  if (head_ < visible()) return std::nullopt;
  if (head_ >= cut_at_) return cut_;
  return head_ == tail_ ? finished_ : std::nullopt;
}

void Pipe::on_bytes(std::optional<Notice> notice) {
  MutexLock lock(mutex_);
  reader_ = std::move(notice);
  arrival_.reset();
  arrival_at_ = {};
  reader_waits();
  if (head_ < visible() || finished_) tell_reader();
}

void Pipe::stop_reading(const Error& why) {
  MutexLock lock(mutex_);
  if (!deaf_) deaf_ = why;
  tell_writer();
}

void Pipe::tell_reader() {
  if (reader_ && std::exchange(reader_waits_, false)) reader_->post();
}

// Not for every byte: a writer that is woken should have something to do.
void Pipe::tell_of_room() {
  if (ring_.size() - static_cast<std::size_t>(tail_ - head_) >= ring_.size() / 4) tell_writer();
}

void Pipe::tell_writer() {
  if (writer_ && std::exchange(writer_waits_, false)) writer_->post();
}

void Pipe::hold_at(std::uint64_t position) {
  MutexLock lock(mutex_);
  held_at_ = position;
  reader_waits_ = true;
  tell_reader();
}

void Pipe::cut_at(std::uint64_t position, const Error& why) {
  MutexLock lock(mutex_);
  cut_at_ = position;
  cut_ = why;
  reader_waits_ = true;
  tell_reader();
}

void Pipe::corrupt(std::uint64_t position) {
  MutexLock lock(mutex_);
  corrupted_.push_back(position);
  if (position >= head_ && position < tail_)
    ring_[static_cast<std::size_t>(position % ring_.size())] ^= std::byte{0xff};
}

void Pipe::move_at_most(std::size_t bytes) {
  MutexLock lock(mutex_);
  at_most_ = bytes;
}

std::uint64_t Pipe::written() const {
  MutexLock lock(mutex_);
  return tail_;
}

}  // namespace weft::transport::inproc
