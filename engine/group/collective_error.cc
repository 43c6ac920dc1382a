// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <sstream>

#include <ATen/ops/from_blob.h>

#include <weft/base/make_error.h>
#include <weft/engine/group/collective_error.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/objects.h>

namespace weft::group {

namespace {

constexpr std::int64_t kMostText = 16 << 10;

// One byte of blame, the ranks as decimal numbers, a line end, and the text.
std::string in_bytes(const Error& error) {
  std::string ranks;
  for (const int rank : error.ranks()) ranks += std::to_string(rank) + " ";
  if (ranks.size() > kMostText / 2) ranks.clear();
  const std::string text = static_cast<char>(error.blame()) + ranks + "\n" + error.text();
  return text.substr(0, kMostText);
}

Error from_bytes(const at::Tensor& tensor) {
  const at::Tensor here = tensor.to(at::kCPU);
  const std::string bytes(static_cast<const char*>(here.const_data_ptr()),
                          static_cast<std::size_t>(here.numel()));
  const int blame = static_cast<unsigned char>(bytes.front());
  const auto line = std::min(bytes.find('\n'), bytes.size() - 1);
  std::istringstream numbers(bytes.substr(1, line - 1));
  return Error(blame > static_cast<int>(kLastBlame) ? Blame::Remote : static_cast<Blame>(blame),
               bytes.substr(line + 1))
      .with_ranks({std::istream_iterator<int>(numbers), std::istream_iterator<int>()});
}

}  // namespace

Error first_line_of(const std::exception_ptr& caught) {
  try {
    std::rethrow_exception(caught);
  } catch (const Error& error) {
    return error;
  } catch (...) {
    const Error error = to_error(caught, Blame::Caller);
    return error.with_text(error.text().substr(0, error.text().find('\n')));
  }
}

std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
    return std::nullopt;
  } catch (...) {
    return first_line_of(std::current_exception());
  }
}

void agree(ProcessGroup& group, const std::optional<Error>& failure) {
  std::string mine = failure ? in_bytes(*failure) : std::string();
  const at::Tensor bytes = at::from_blob(mine.data(), {static_cast<std::int64_t>(mine.size())},
                                         at::TensorOptions(at::kByte));
  const auto all = detail::all_gather_ragged(
      bytes.to(Core::of(group).carriers.host_values_device()), group,
      {"the text of an error", kMostText, "that rank runs another program"});
  const auto first =
      std::find_if(all.begin(), all.end(), [](const at::Tensor& said) { return said.numel() > 0; });
  if (first == all.end()) return;
  throw_together(group, from_bytes(*first));
}

void throw_together(ProcessGroup& group, const Error& error) {
  static_cast<void>(error_of([&] { group.barrier().synchronize(); }));
  throw Error(error);
}

}  // namespace weft::group
