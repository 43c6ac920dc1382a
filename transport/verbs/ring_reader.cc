// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include <unistd.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/verbs/ring_reader.h>

namespace weft::transport::verbs {

namespace {

constexpr std::size_t kLeastPlace = 4 << 10;  // for less, the ring is as fast

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

}  // namespace

RingReader::RingReader(QueuePair& pair, std::shared_ptr<RegistrationCache> registrations,
                       RingWriter& writer)
    : pair_(pair),
      registrations_(std::move(registrations)),
      writer_(writer),
      ring_(kRingBytes),
      ring_registration_(pair.path().device, ring_.whole(), Access::RemoteWrite),
      receives_(static_cast<std::uint32_t>(pair.depths().receives)),
      notes_(whole_pages(receives_ * Note::kBytes)),
      notes_registration_(pair.path().device, {notes_.at(0), notes_.bytes(), weft::Device::host()},
                          Access::Receive) {
  for (std::uint32_t i = 0; i < receives_; ++i) post_receive(i);
}

void RingReader::post_receive(std::uint64_t number) {
  if (!pair_.post_receive(number, notes_.at(number * Note::kBytes), Note::kBytes,
                          notes_registration_.local_key())) {
    throw Error(Blame::Device, pair_.path().name() + ": a receive cannot be posted");
  }
}

void RingReader::received(std::uint64_t number) {
  post_receive(number);
  ++granted_;
}

const char* RingReader::wrote(std::uint64_t number, std::uint32_t immediate) {
  received(number);
  if (finished_) return "bytes after its end";
  if (immediate == kPlaced) {
    if (direct_.phase != Phase::Placing) return "a piece in a place that it was not given";
    direct_.registration->flush();
    direct_.phase = Phase::Placed;
    direct_.registration.reset();
  } else {
    if (immediate == 0 || immediate > kRingBytes - (head_ - tail_))
      return "more bytes than there was room for";
    if (direct_.phase == Phase::Waits || direct_.phase == Phase::Placing || next_)
      return "bytes after a piece that waits for a place";
    head_ += immediate;
  }
  tell_room();
  return nullptr;
}

const char* RingReader::noted(std::uint64_t number, std::uint32_t bytes) {
  const auto note = decode_note(
      Bytes(notes_.at(number * Note::kBytes), std::min<std::size_t>(bytes, Note::kBytes)));
  received(number);
  if (!note) return "an invalid note";
  if (const char* why = take(*note)) return why;
  tell_room();
  return nullptr;
}

const char* RingReader::take(const Note& note) {
  switch (note.kind) {
    case Note::Kind::Waits:
      if (direct_.phase == Phase::Waits || direct_.phase == Phase::Placing || next_)
        return "a second piece while one waits for a place";
      if (note.position != head_ || note.bytes == 0 || finished_)
        return "a waiting piece at a wrong position";
      next_ = note;
      if (direct_.phase == Phase::None) go_on();
      break;
    case Note::Kind::Finished: finished_ = true; break;
    default: return writer_.heard(note);
  }
  return writer_.granted(note.granted);
}

std::size_t RingReader::readable() const {
  const std::uint64_t end = direct_.phase == Phase::None ? head_ : direct_.position;
  return static_cast<std::size_t>(end - tail_);
}

Bytes RingReader::peek() noexcept {
  if (broken_) return {};
  // A caller of peek() has no place for the piece, so it gets the piece through the ring.
  if (direct_.phase == Phase::Waits && is_at_piece()) send_through_ring();
  return {ring_.at(tail_), readable()};
}

void RingReader::consume(std::size_t bytes) noexcept {
  tail_ += bytes;
  tell_room();
}

std::size_t RingReader::read(std::span<std::byte> to) noexcept {
  if (broken_) return 0;
  if (is_at_piece()) {
    if (direct_.phase == Phase::Waits) {
      to.size() >= kLeastPlace ? name_place(to) : send_through_ring();
      return 0;
    }
    if (direct_.phase == Phase::Placing) return 0;
    if (to.data() != direct_.place) broken("read() was called with other memory than before");
    const auto bytes = static_cast<std::size_t>(direct_.bytes);
    go_on();
    return bytes;
  }
  const std::size_t bytes = std::min(readable(), to.size());
  if (bytes == 0) return 0;
  if (!copy_out(to.first(bytes))) return 0;
  consume(bytes);
  return bytes;
}

bool RingReader::copy_out(std::span<std::byte> to) noexcept {
  const auto of_gpu = registrations_->gpus().at(to.data(), to.size());
  if (!of_gpu) {
    std::memcpy(to.data(), ring_.at(tail_), to.size());
    return true;
  }
  try {  // the peer could not register the memory that it sends
    if (!std::exchange(has_copied_, true)) {
      log::warn("verbs: data from " + writer_.peer() + " is copied to memory of " +
                describe(of_gpu->memory().device) +
                " through the ring, which is slow and blocks the event loop: the peer cannot "
                "register the memory that it sends (see its log)");
    }
    of_gpu->copy(to.data(), ring_.at(tail_), to.size());
    return true;
  } catch (...) {
    broken_ = true;
    writer_.give_up(to_error(std::current_exception(), Blame::Busy));
    return false;
  }
}

void RingReader::name_place(std::span<std::byte> to) noexcept {
  const auto bytes = static_cast<std::size_t>(std::min<std::uint64_t>(to.size(), direct_.bytes));
  try {
    direct_.registration = registrations_->of(to.data(), bytes, Access::RemoteWrite);
  } catch (const Error& error) {
    log::warn("verbs: " + error.text() + "; the payload is copied instead");
    return send_through_ring();
  }
  direct_.phase = Phase::Placing;
  direct_.bytes = bytes;
  direct_.place = to.data();
  told_granted_ = granted_;
  writer_.tell({.kind = Note::Kind::Place,
                .granted = granted_,
                .key = direct_.registration->remote_key(),
                .position = direct_.position,
                .bytes = bytes,
                .address = reinterpret_cast<std::uintptr_t>(to.data())});
}

void RingReader::send_through_ring() noexcept {
  told_granted_ = granted_;
  writer_.tell({.kind = Note::Kind::Place, .granted = granted_, .position = direct_.position});
  go_on();
}

void RingReader::go_on() noexcept {
  direct_ = {};
  if (!next_) return;
  direct_ = {.phase = Phase::Waits, .position = next_->position, .bytes = next_->bytes};
  next_.reset();
}

void RingReader::tell_room() noexcept {
  const bool is_due = tail_ - told_ >= kRingBytes / 4 || granted_ - told_granted_ >= receives_ / 4;
  if (!is_due) return;
  told_ = tail_;
  told_granted_ = granted_;
  writer_.tell({.kind = Note::Kind::Room, .granted = granted_, .position = tail_});
}

bool RingReader::withdraw() noexcept {
  const bool must_destroy = direct_.phase == Phase::Placing;
  if (must_destroy) writer_.destroy();
  // A piece that still waits is sent through the ring and discarded there.
  if (direct_.phase != Phase::Waits) go_on();
  return must_destroy;
}

}  // namespace weft::transport::verbs
