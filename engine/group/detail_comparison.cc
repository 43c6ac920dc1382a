// SPDX-License-Identifier: Apache-2.0
#include <sstream>

#include <weft/engine/group/detail_comparison.h>
#include <weft/engine/group/meeting.h>
#include <weft/engine/group/store_meeting.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// How long the other side of a message has to describe its call.
constexpr auto kOtherSide = std::chrono::seconds(10);

// A rank's description of a collective; in the store it is three lines.
struct Said {
  std::string call;
  Operation::Parts parts;
};

std::string encode(const Said& said) {
  std::string text = said.call;
  for (const auto* numbers : {&said.parts.sends, &said.parts.takes}) {
    text += "\n";
    for (const std::int64_t number : *numbers) text += std::to_string(number) + " ";
  }
  return text;
}

Said decode(const std::string& text) {
  Said said;
  std::istringstream lines(text);
  std::getline(lines, said.call);
  for (auto* numbers : {&said.parts.sends, &said.parts.takes}) {
    std::string line;
    std::getline(lines, line);
    std::istringstream fields(line);
    for (std::int64_t number; fields >> number;) numbers->push_back(number);
  }
  return said;
}

// Throws if `theirs`, the description that `rank` gave of the collective, does not match `mine`.
void check_same(const CoreOptions& options, std::uint64_t number, const Said& mine, int rank,
                const std::string& theirs) {
  const std::string disagree = "WEFT_DEBUG=detail: ranks disagree in collective #" +
                               std::to_string(number) + " " + options.place() + ": rank " +
                               std::to_string(options.rank);
  const std::string peer = "rank " + std::to_string(rank);
  const Said said = decode(theirs);
  if (said.call != mine.call) {
    throw Error(Blame::Caller,
                disagree + " calls " + mine.call + ", " + peer + " calls " + said.call);
  }
  if (mine.parts.sends.empty()) return;
  const auto here = static_cast<std::size_t>(options.rank), there = static_cast<std::size_t>(rank);
  if (said.parts.sends.size() != mine.parts.sends.size() ||
      said.parts.takes.size() != mine.parts.takes.size()) {
    throw Error(Blame::Protocol,
                disagree + " cannot read what " + peer + " says about its parts: " + theirs);
  }
  if (mine.parts.sends[there] != said.parts.takes[here]) {
    throw Error(Blame::Caller,
                disagree + " sends " + peer + " " + std::to_string(mine.parts.sends[there]) +
                    " elements, and that rank takes " + std::to_string(said.parts.takes[here]));
  }
  if (mine.parts.takes[there] != said.parts.sends[here]) {
    throw Error(Blame::Caller, disagree + " takes " + std::to_string(mine.parts.takes[there]) +
                                   " elements from " + peer + ", which sends " +
                                   std::to_string(said.parts.sends[here]));
  }
}

// The beginning of the keys under which this rank and `peer` describe the message.
std::string message_key(int self, int peer, const DetailComparison::Message& message) {
  const int from = message.is_send ? self : peer;
  const int to = message.is_send ? peer : self;
  return "detail/message/" + std::to_string(from) + "-" + std::to_string(to) + "/" +
         std::to_string(message.tag) + "/" + std::to_string(*message.number) + "/";
}

const char* own_side(const DetailComparison::Message& message) {
  return message.is_send ? "sent" : "received";
}

}  // namespace

DetailComparison::DetailComparison(const CoreOptions& options, StoreBootstrap& store,
                                   Failure& failure, MessageNumbers& numbers,
                                   const std::enable_shared_from_this<Core>& owner)
    : options_(options), store_(store), failure_(failure), numbers_(numbers), owner_(owner) {}

void DetailComparison::compare(const Operation& operation, std::uint64_t number) {
  const std::string base = "detail/" + std::to_string(number) + "/";
  const std::string fingerprint = operation.fingerprint();
  const Said mine{operation.name + (fingerprint.empty() ? "" : " " + fingerprint),
                  operation.parts ? operation.parts() : Operation::Parts()};
  const Deadline deadline = Deadline::in(options_.timeout);
  Meeting wait(options_.job->waits, options_.name,
               std::string(operation.name) + " #" + std::to_string(number), options_.rank, kAllCall,
               absent_from(options_, base));
  const StoreCallBounds bounds([&] { wait.look(); });
  store_.set(base + std::to_string(options_.rank), to_bytes(encode(mine)));
  StoreBootstrap store(options_.own_store, [&] {
    failure_.throw_if_broken();
    wait.look();
  });
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    std::string theirs;
    try {
      theirs = to_text(store.get(base + std::to_string(rank), deadline));
    } catch (const Error& error) {
      throw error
          .with_text("WEFT_DEBUG=detail: rank " + std::to_string(rank) +
                     " did not come to collective #" + std::to_string(number) + " (" + mine.call +
                     ") " + options_.place() + ": " + error.text())
          .with_ranks({rank});
    }
    check_same(options_, number, mine, rank, theirs);
  }
  // All ranks have read the description of the collective before the last one.
  if (number > 2)
    store_.erase("detail/" + std::to_string(number - 2) + "/" + std::to_string(options_.rank));
}

// A message ends only once both sides have called, so each finds the other's description in the
// store. The Work ends after the comparison.
Op DetailComparison::compare(const Op& op, const Message& message) {
  const std::string mine = std::to_string(message.tensor.numel()) + " elements of " +
                           c10::toString(message.tensor.scalar_type());
  if (message.peer != transport::kAnySource) {
    store_.set(message_key(options_.rank, message.peer, message) + own_side(message),
               to_bytes(mine));
  }
  Completion compared{Pin()};
  auto compare = [this, weak = owner_.weak_from_this(), op, message, mine, compared]() mutable {
    const auto alive = weak.lock();
    const auto failure = op.error();
    if (!alive || failure)
      return static_cast<void>(failure ? compared.fail(*failure) : compared.finish());
    compare_ended(op, message, mine, compared);
  };
  op.on_ended(
      [continuations = options_.job->continuations, compare = std::move(compare)]() mutable {
        continuations->run(Task(std::move(compare)));  // compare() waits for the store
      });
  return compared.op();
}

// The message has ended. Ends `compared`, once the other side has described its call.
void DetailComparison::compare_ended(const Op& op, const Message& message, const std::string& mine,
                                     Completion& compared) {
  const bool from_any = message.peer == transport::kAnySource;
  const int peer = from_any ? op.source_rank() : message.peer;
  if (from_any) *message.number = numbers_.next(false, peer, message.tag);
  compared.set_source_rank(op.source_rank());
  const std::string own = own_side(message);
  const std::string other = message.is_send ? "received" : "sent";
  try {
    const std::string key = message_key(options_.rank, peer, message);
    if (from_any) store_.set(key + own, to_bytes(mine));
    const std::string theirs = to_text(store_.get(key + other, Deadline::in(kOtherSide)));
    store_.erase(key + other);
    if (theirs == mine) return static_cast<void>(compared.finish());
    compared.fail(Error(Blame::Caller, "WEFT_DEBUG=detail: ranks disagree in message #" +
                                           std::to_string(*message.number) + " of tag " +
                                           std::to_string(message.tag) + " " + options_.place() +
                                           ": this rank " + own + " " + mine + ", rank " +
                                           std::to_string(peer) + " " + other + " " + theirs));
  } catch (const Error& error) {
    compared.fail(error.within("WEFT_DEBUG=detail: comparing " + message.name + " with what rank " +
                               std::to_string(peer) + " " + other));
  }
}

}  // namespace weft::group
