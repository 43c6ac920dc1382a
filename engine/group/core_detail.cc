// WEFT_DEBUG=detail over backends whose messages do not describe the call: ranks exchange
// descriptions of their calls in the store and compare them.
#include <sstream>

#include <weft/engine/group/core.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// How long the other side of a message has to describe its call.
constexpr auto kOtherSide = std::chrono::seconds(10);

// A rank's description of a collective; in the store it is three lines.
struct Said {
  std::string call;
  Core::Operation::Parts parts;
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

std::string message_key(int from, int to, int tag, std::uint64_t number) {
  return "detail/message/" + std::to_string(from) + "-" + std::to_string(to) + "/" +
         std::to_string(tag) + "/" + std::to_string(number) + "/";
}

}  // namespace

void Core::compare_across_ranks(const Operation& operation, std::uint64_t number) {
  const std::string base = "detail/" + std::to_string(number) + "/";
  const std::string fingerprint = operation.fingerprint();
  const Said mine{operation.name + (fingerprint.empty() ? "" : " " + fingerprint),
                  operation.parts ? operation.parts() : Operation::Parts()};
  bootstrap->set(base + std::to_string(options.rank), to_bytes(encode(mine)));
  const Deadline deadline = Deadline::in(options.timeout);
  Waits::Meeting wait(options.job->waits, options.name,
                      std::string(operation.name) + " #" + std::to_string(number), options.rank,
                      kAllCall, [this, base] { return absent_from(base); });
  StoreBootstrap store(options.own_store, [&] {
    failure.throw_if_broken();
    wait.look();
  });
  for (int rank = 0; rank < options.size; ++rank) {
    if (rank == options.rank) continue;
    std::string theirs;
    try {
      theirs = to_text(store.get(base + std::to_string(rank), deadline));
    } catch (const Error& error) {
      throw error
          .with_text("WEFT_DEBUG=detail: rank " + std::to_string(rank) +
                     " did not come to collective #" + std::to_string(number) + " (" + mine.call +
                     ") " + options.place() + ": " + error.text())
          .with_ranks({rank});
    }
    const std::string disagree = "WEFT_DEBUG=detail: ranks disagree in collective #" +
                                 std::to_string(number) + " " + options.place() + ": rank " +
                                 std::to_string(options.rank);
    const std::string peer = "rank " + std::to_string(rank);
    const Said said = decode(theirs);
    if (said.call != mine.call) {
      throw Error(Blame::Caller,
                  disagree + " calls " + mine.call + ", " + peer + " calls " + said.call);
    }
    if (mine.parts.sends.empty()) continue;
    const auto here = static_cast<std::size_t>(options.rank),
               there = static_cast<std::size_t>(rank);
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
  // All ranks have read the description of the collective before the last one.
  if (number > 2)
    bootstrap->erase("detail/" + std::to_string(number - 2) + "/" + std::to_string(options.rank));
}

// A message ends only once both sides have called, so each finds the other's description in the
// store. The Work ends after the comparison.
Op Core::compare_message(const Op& op, const MessageCalled& called) {
  const std::string mine = std::to_string(called.tensor.numel()) + " elements of " +
                           c10::toString(called.tensor.scalar_type());
  const auto key_of = [self = options.rank, called](int peer, std::uint64_t number) {
    return called.is_send ? message_key(self, peer, called.tag, number)
                          : message_key(peer, self, called.tag, number);
  };
  const std::string own = called.is_send ? "sent" : "received";
  const std::string other = called.is_send ? "received" : "sent";
  if (called.peer != transport::kAnySource)
    bootstrap->set(key_of(called.peer, *called.number) + own, to_bytes(mine));
  Completion compared{Pin()};
  auto compare = [weak = weak_from_this(), op, called, compared, mine, own, other,
                  key_of]() mutable {
    const auto core = weak.lock();
    const auto failure = op.error();
    if (!core || failure)
      return static_cast<void>(failure ? compared.fail(*failure) : compared.finish());
    const bool from_any = called.peer == transport::kAnySource;
    const int peer = from_any ? op.source_rank() : called.peer;
    if (from_any) *called.number = core->next_message(false, peer, called.tag);
    const std::uint64_t number = *called.number;
    compared.set_source_rank(op.source_rank());
    try {
      const std::string key = key_of(peer, number);
      if (from_any) core->bootstrap->set(key + own, to_bytes(mine));
      const std::string theirs =
          to_text(core->bootstrap->get(key + other, Deadline::in(kOtherSide)));
      core->bootstrap->erase(key + other);
      if (theirs == mine) return static_cast<void>(compared.finish());
      compared.fail(Error(
          Blame::Caller, "WEFT_DEBUG=detail: ranks disagree in message #" + std::to_string(number) +
                             " of tag " + std::to_string(called.tag) + " " + core->options.place() +
                             ": this rank " + own + " " + mine + ", rank " + std::to_string(peer) +
                             " " + other + " " + theirs));
    } catch (const Error& error) {
      compared.fail(error.within("WEFT_DEBUG=detail: comparing " + called.name +
                                 " with what rank " + std::to_string(peer) + " " + other));
    }
  };
  op.on_ended([continuations = options.job->continuations, compare = std::move(compare)]() mutable {
    continuations->run(Task(std::move(compare)));  // compare() waits for the store
  });
  return compared.op();
}

}  // namespace weft::group
