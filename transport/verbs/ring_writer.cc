// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/verbs/ring_writer.h>

namespace weft::transport::verbs {

namespace {

constexpr std::size_t kRingWrite = 64 << 10;    // most bytes of one write to the ring
constexpr std::uint32_t kPlaceWrite = 1 << 20;  // most bytes of one write to a place
constexpr std::size_t kSpareSends = 4;          // entries of the send queue reserved for notes
// Receives of the peer reserved for notes that grant receives; without them both ends could wait
// for each other.
constexpr std::uint32_t kSpareReceives = 4;
// Writes to a place that may be outstanding; the rest of the queue is left for other work.
constexpr std::size_t kPlacesUnderway = 16;

}  // namespace

RingWriter::RingWriter(QueuePair& pair, std::shared_ptr<RegistrationCache> registrations,
                       std::string peer)
    : pair_(pair),
      registrations_(std::move(registrations)),
      name_of_peer_(std::move(peer)),
      staging_(kRingBytes),
      staged_(pair.path().device, staging_.whole(), Access::Read) {}

void RingWriter::open(const Hello& peer) {
  MutexLock lock(mutex_);
  peer_ = peer;
  has_news_ = true;
  post_notes();
}

bool RingWriter::may_post() const {
  return peer_ && !failure_ &&
         outstanding_.size() + kSpareSends < static_cast<std::size_t>(pair_.depths().sends) &&
         messages_ - granted_ + kSpareReceives < peer_->receives;
}

std::size_t RingWriter::room() const {
  const std::uint64_t end = head_ + unposted_;
  return static_cast<std::size_t>(
      std::min(peer_->ring_bytes - (end - read_), std::uint64_t{kRingBytes} - (end - carried_)));
}

std::size_t RingWriter::write(std::span<const Bytes> pieces) noexcept {
  MutexLock lock(mutex_);
  std::size_t taken = 0;
  std::size_t offered = 0;
  for (const Bytes& piece : pieces) offered += piece.size();
  for (Bytes piece : pieces) {
    if (direct_.phase == Phase::Written) {
      const auto bytes = static_cast<std::size_t>(direct_.wanted);
      taken += bytes;
      piece = piece.subspan(bytes);
      direct_ = {};
    }
    const std::size_t part = take(piece);
    taken += part;
    if (part < piece.size()) break;
  }
  post_ring();
  wants_room_ = taken < offered;
  has_news_ = false;
  return taken;
}

std::size_t RingWriter::take(Bytes piece) {
  std::size_t taken = 0;
  while (taken < piece.size()) {
    if (direct_.phase != Phase::None || !may_post()) break;
    const Bytes rest = piece.subspan(taken);
    const bool is_direct =
        rest.size() >= kDirectBytes || registrations_->gpus().at(rest.data(), rest.size());
    if (is_direct && through_ring_ == 0) {
      post_ring();
      if (!may_post() || begin_direct(rest)) break;
      through_ring_ = rest.size();
    }
    const std::size_t part = std::min({rest.size(), room(), kRingWrite - unposted_});
    if (part == 0) break;
    if (!copy_in(rest.first(part))) break;
    unposted_ += part;
    taken += part;
    through_ring_ -= std::min(through_ring_, part);
    if (unposted_ == kRingWrite) post_ring();
  }
  return taken;
}

bool RingWriter::copy_in(Bytes piece) noexcept {
  void* const to = staging_.at(head_ + unposted_);
  const auto of_gpu = registrations_->gpus().at(piece.data(), piece.size());
  if (!of_gpu) {
    std::memcpy(to, piece.data(), piece.size());
    return true;
  }
  try {  // the peer discards the piece or has no place for it
    if (!std::exchange(has_copied_, true)) {
      log::warn("verbs: memory of " + describe(of_gpu->memory().device) + " is copied to " +
                name_of_peer_ +
                " through the ring, which is slow and blocks the event loop: the peer discards it, "
                "or cannot register its own memory (see its log)");
    }
    of_gpu->copy(to, piece.data(), piece.size());
    return true;
  } catch (...) {
    failure_ = to_error(std::current_exception(), Blame::Busy);
    return false;
  }
}

Result<bool> RingWriter::put(std::uint64_t address, std::uint32_t key, Bytes piece) noexcept {
  MutexLock lock(mutex_);
  if (direct_.phase == Phase::Written) {
    direct_ = {};
    return true;
  }
  if (direct_.phase == Phase::None && peer_) {
    try {
      direct_.registration = registrations_->of(piece.data(), piece.size(), Access::Read);
    } catch (const Error& error) {
      return error;
    }
    direct_.phase = Phase::Writing;
    direct_.is_put = true;
    direct_.piece = piece;
    direct_.wanted = piece.size();
    direct_.address = address;
    direct_.key = key;
    post_direct();
  }
  wants_room_ = true;
  has_news_ = false;
  return false;
}

// Returns false if the memory cannot be registered.
bool RingWriter::begin_direct(Bytes piece) {
  try {
    direct_.registration = registrations_->of(piece.data(), piece.size(), Access::Read);
  } catch (const Error& error) {
    log::warn("verbs: " + error.text() + "; the payload is copied instead");
    return false;
  }
  direct_.piece = piece;
  direct_.phase = Phase::Waits;
  post_note({.kind = Note::Kind::Waits, .position = head_, .bytes = piece.size()});
  return true;
}

void RingWriter::post_ring() {
  if (unposted_ == 0 || failure_) return;
  const auto bytes = static_cast<std::uint32_t>(unposted_);
  QueuePair::Write write;
  write.from = staging_.at(head_);
  write.bytes = bytes;
  write.local_key = staged_.local_key();
  write.to = peer_->ring_address + head_ % peer_->ring_bytes;
  write.remote_key = peer_->ring_key;
  write.immediate = bytes;
  write.may_inline = true;
  if (!posted(pair_.post_write(0, write), {Posted::Ring, bytes})) return;
  head_ += unposted_;
  unposted_ = 0;
  ++messages_;
}

void RingWriter::post_direct() {
  if (direct_.phase != Phase::Writing) return;
  const std::uint32_t most =
      std::min({kPlaceWrite, peer_->max_write_bytes, pair_.path().choice.port.max_message});
  while (direct_.posted < direct_.wanted && may_post() && outstanding_.size() < kPlacesUnderway) {
    const auto bytes =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(most, direct_.wanted - direct_.posted));
    const bool is_last = direct_.posted + bytes == direct_.wanted;
    QueuePair::Write write;
    write.from = direct_.piece.data() + direct_.posted;
    write.bytes = bytes;
    write.local_key = direct_.registration->local_key();
    write.to = direct_.address + direct_.posted;
    write.remote_key = direct_.key;
    const bool tells = is_last && !direct_.is_put;
    if (tells) write.immediate = kPlaced;
    if (!posted(pair_.post_write(0, write), {is_last ? Posted::LastOfPlace : Posted::Place, bytes}))
      return;
    direct_.posted += bytes;
    messages_ += tells;
  }
}

bool RingWriter::posted(bool taken, Sent what) {
  if (!taken) {
    if (!failure_)
      failure_ = Error(Blame::Device, "verbs: " + pair_.path().name() + " refuses more work");
    return false;
  }
  outstanding_.push_back(what);
  return true;
}

bool RingWriter::post_note(const Note& note) {
  Note complete = note;
  complete.granted = my_grants_;
  const auto bytes = encode(complete);
  if (!posted(pair_.post_send(0, bytes.data(), bytes.size()), {})) return false;
  ++messages_;
  return true;
}

void RingWriter::post_notes() {
  const auto has_slot = [&]() WEFT_REQUIRES(mutex_) {
    return outstanding_.size() < static_cast<std::size_t>(pair_.depths().sends);
  };
  if (!peer_ || failure_) return;
  if (place_note_ && may_post() && post_note(*place_note_)) place_note_.reset();
  if (room_note_ && has_slot() && messages_ - granted_ < peer_->receives && post_note(*room_note_))
    room_note_.reset();
  if (finish_due_ && may_post() && post_note({.kind = Note::Kind::Finished})) finish_due_ = false;
}

void RingWriter::finish() noexcept {
  MutexLock lock(mutex_);
  finish_due_ = true;
  post_notes();
}

void RingWriter::tell(const Note& note) noexcept {
  MutexLock lock(mutex_);
  my_grants_ = note.granted;
  (note.kind == Note::Kind::Room ? room_note_ : place_note_) = note;
  post_notes();
}

void RingWriter::sent() noexcept {
  MutexLock lock(mutex_);
  if (outstanding_.empty()) return;
  const Sent oldest = outstanding_.front();
  outstanding_.pop_front();
  if (oldest.what == Posted::Ring) carried_ += oldest.bytes;
  if (oldest.what == Posted::LastOfPlace && direct_.phase == Phase::Writing) {
    direct_.phase = Phase::Written;
    direct_.registration.reset();
  }
  has_news_ = true;
  post_notes();
  post_direct();
}

const char* RingWriter::take_grants(std::uint32_t receives) {
  if (receives - granted_ > messages_ - granted_) return "grants of more receives than were used";
  granted_ = receives;
  has_news_ = true;
  return nullptr;
}

const char* RingWriter::granted(std::uint32_t receives) noexcept {
  MutexLock lock(mutex_);
  if (const char* why = take_grants(receives)) return why;
  post_notes();
  post_direct();
  return nullptr;
}

const char* RingWriter::heard(const Note& note) noexcept {
  MutexLock lock(mutex_);
  if (const char* why = take_grants(note.granted)) return why;
  if (note.kind == Note::Kind::Place) {
    if (const char* why = take_place(note)) return why;
  } else {
    if (note.position < read_ || note.position > head_) return "an impossible read position";
    read_ = note.position;
  }
  post_notes();
  post_direct();
  return nullptr;
}

const char* RingWriter::take_place(const Note& note) {
  if (direct_.phase != Phase::Waits)
    return withdrawn_ ? nullptr : "a place although no piece waits";
  if (note.position != head_ || note.bytes > direct_.piece.size())
    return "a place for a different piece";
  if (note.bytes == 0) {
    through_ring_ = direct_.piece.size();
    direct_ = {};
    return nullptr;
  }
  direct_.phase = Phase::Writing;
  direct_.wanted = note.bytes;
  direct_.address = note.address;
  direct_.key = note.key;
  return nullptr;
}

bool RingWriter::has_room() const noexcept {
  MutexLock lock(mutex_);
  return wants_room_ && has_news_;
}

bool RingWriter::take_room() noexcept {
  MutexLock lock(mutex_);
  if (!wants_room_ || !has_news_) return false;
  has_news_ = false;
  return true;
}

std::optional<Error> RingWriter::failure() const noexcept {
  MutexLock lock(mutex_);
  return failure_;
}

void RingWriter::give_up(const Error& why) noexcept {
  MutexLock lock(mutex_);
  if (!failure_) failure_ = why;
}

void RingWriter::destroy() noexcept {
  MutexLock lock(mutex_);
  pair_.destroy();
}

bool RingWriter::has_words_underway() const noexcept {
  MutexLock lock(mutex_);
  return std::ranges::any_of(outstanding_, [](const Sent& one) {
    return one.what == Posted::Ring || one.what == Posted::Note;
  });
}

bool RingWriter::is_writing() const noexcept {
  MutexLock lock(mutex_);
  return direct_.phase == Phase::Writing;
}

bool RingWriter::withdraw() noexcept {
  MutexLock lock(mutex_);
  withdrawn_ = true;
  const bool must_destroy = direct_.phase == Phase::Writing;
  if (must_destroy) pair_.destroy();
  direct_ = {};
  return must_destroy;
}

}  // namespace weft::transport::verbs
