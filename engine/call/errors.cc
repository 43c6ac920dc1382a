// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <string_view>
#include <utility>

#include <weft/base/make_error.h>
#include <weft/engine/call/errors.h>
#include <weft/engine/call/types.h>

namespace weft::rpc {

Error Outcome::error() const { return Error(blame_from(blame), text).with_ranks(ranks); }

std::string describe(const WorkerInfo& worker) {
  return worker.name + " (rank " + std::to_string(worker.rank) + ")";
}

namespace {

// An error's text names only the first and the last of the calls that it has passed through.
constexpr std::size_t kFirstNamed = 4;
constexpr std::size_t kLastNamed = 4;
constexpr std::string_view kThrew = " threw: ";
constexpr std::string_view kBetween = " calls between …";

// The number of calls that a part of such a text stands for.
std::size_t calls_of(std::string_view part) {
  constexpr std::string_view kBegin = "… ";
  std::size_t number = 1;
  if (part.starts_with(kBegin) && part.ends_with(kBetween))
    std::from_chars(part.data() + kBegin.size(), part.data() + part.size(), number);
  return number;
}

// Shortens the text of an error that has passed through nested calls, each of which has added "f on
// worker1 threw: " in front. Of many calls, the text keeps the first ones, the last ones, the
// cause, and the number of the calls between.
std::string shortened(const std::string& text) {
  std::vector<std::string_view> parts;  // the last is the cause
  std::size_t begin = 0;
  for (auto end = text.find(kThrew); end != std::string::npos; end = text.find(kThrew, begin)) {
    parts.push_back(std::string_view(text).substr(begin, end - begin));
    begin = end + kThrew.size();
  }
  if (parts.size() <= kFirstNamed + kLastNamed + 1) return text;
  std::string result;
  std::size_t between = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const bool is_named = i < kFirstNamed || i + kLastNamed >= parts.size();
    if (!is_named) {
      between += calls_of(parts[i]);
      if (i + kLastNamed + 1 < parts.size()) continue;
      result += "… " + std::to_string(between) + std::string(kBetween);
    } else {
      result += parts[i];
    }
    result += kThrew;
  }
  return result + text.substr(begin);
}

}  // namespace

RemoteError::RemoteError(std::string worker, std::string function, std::string text,
                         const std::vector<int>& ranks)
    : Error(Error(Blame::Remote, function + " on " + worker + std::string(kThrew) + shortened(text))
                .with_ranks(ranks)),
      worker_(std::move(worker)),
      function_(std::move(function)),
      text_(shortened(text)) {}

}  // namespace weft::rpc

namespace weft::call {

Outcome outcome_of(const std::exception_ptr& error) {
  return error ? Outcome(to_error(error, Blame::Remote)) : Outcome();
}

}  // namespace weft::call
