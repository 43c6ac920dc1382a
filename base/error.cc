// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <typeinfo>
#include <utility>

#include <cxxabi.h>

#include <fcntl.h>
#include <sys/resource.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/base/shortage.h>
#include <weft/base/type_name.h>

namespace weft {

namespace {

std::string message(Blame blame, const std::string& text, Place place) {
  std::string whole = text;
  whole += " [";
  whole += name(blame);
  if (place.line != 0) {
    whole += " at ";
    whole += place.file;
    whole += ":" + std::to_string(place.line);
  }
  whole += "]";
  return whole;
}

constexpr std::size_t kMostText = 16 << 10;
constexpr int kMostNested = 8;

std::string cut(std::string_view text) {
  if (text.size() <= kMostText) return std::string(text);
  // Uses append(), because g++ 12 warns about a copy out of bounds with operator+.
  std::string shorter;
  shorter.append(text.substr(0, kMostText));
  shorter.append("… (the first ").append(std::to_string(kMostText)).append(" of ");
  shorter.append(std::to_string(text.size())).append(" bytes)");
  return shorter;
}

}  // namespace

std::string_view name(Blame blame) {
  switch (blame) {
    case Blame::Caller: return "Caller";
    case Blame::Busy: return "Busy";
    case Blame::Timeout: return "Timeout";
    case Blame::PeerLost: return "PeerLost";
    case Blame::Unsupported: return "Unsupported";
    case Blame::Device: return "Device";
    case Blame::Cancelled: return "Cancelled";
    case Blame::Remote: return "Remote";
    case Blame::Protocol: return "Protocol";
  }
  broken("no such Blame");
}

Error::Error(Blame blame, const std::string& text, Place place) : Error(blame, text, 0, place) {}

Error::Error(Blame blame, const std::string& text, int native_code, Place place)
    : std::runtime_error(message(blame, text, place)),
      blame_(blame),
      native_code_(native_code),
      place_(place),
      text_(text) {}

Error Error::within(const std::string& context) const { return with_text(context + ": " + text_); }

Error Error::with_text(const std::string& text) const {
  Error error(blame_, text, native_code_, place_);
  error.ranks_ = ranks_;
  return error;
}

Error Error::with_ranks(std::vector<int> ranks) const {
  Error error(*this);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  error.ranks_ = std::move(ranks);
  return error;
}

Error system_error(Blame blame, const std::string& text, int number, Place place) {
  char buffer[256];
  return {blame, text + ": " + strerror_r(number, buffer, sizeof buffer) + remedy_for(number),
          number, place};
}

int descriptors_left(int most) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  int left = 0;
  for (rlim_t number = 0; number < limit.rlim_cur && left < most; ++number) {
    if (::fcntl(static_cast<int>(number), F_GETFD) < 0 && errno == EBADF) ++left;
  }
  return left;
}

void require_descriptors(int count, const std::string& who) {
  const int left = descriptors_left(count);
  if (left >= count) return;
  throw Error(Blame::Busy,
              who + " needs " + std::to_string(count) + " file descriptors, and " +
                  (left == 0 ? "none" : std::to_string(left)) +
                  (left > 1 ? " are left" : " is left") + remedy_for(EMFILE),
              EMFILE);
}

std::string remedy_for(int number) {
  if (number != EMFILE) return "";
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return " (this process may have " + std::to_string(limit.rlim_cur) +
         " descriptors open: raise that limit, ulimit -n)";
}

Error to_error(const std::exception_ptr& caught, Blame otherwise) {
  try {
    std::rethrow_exception(caught);
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {otherwise, "this process is out of memory (std::bad_alloc)"};
  } catch (...) {
    return {otherwise, text_of(caught)};
  }
}

std::string text_of(const std::exception& error) {
  std::string text;
  const std::exception* now = &error;
  std::exception_ptr nested;  // owns *now, except the first
  for (int depth = 1;; ++depth) {
    const char* const what = now->what();
    text += what != nullptr ? cut(what) : type_name(typeid(*now)) + " with a null what()";
    const auto* const outer = dynamic_cast<const std::nested_exception*>(now);
    if (outer == nullptr || !outer->nested_ptr() || depth == kMostNested) return text;
    nested = outer->nested_ptr();
    text += ", caused by: ";
    try {
      std::rethrow_exception(nested);
    } catch (const std::exception& inner) {
      now = &inner;
    } catch (...) {
      return text + text_of(nested);
    }
  }
}

std::string text_of(const std::exception_ptr& caught) {
  try {
    std::rethrow_exception(caught);
  } catch (const std::exception& error) {
    return text_of(error);
  } catch (const std::string& thrown) {
    return cut(thrown);
  } catch (const char* thrown) {
    return thrown != nullptr ? cut(thrown) : "a null char*";
  } catch (...) {
    return "an object of type " + type_name(*abi::__cxa_current_exception_type()) +
           ", which is not a std::exception";
  }
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  if (ranks.empty()) return text;
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string ranks_have(const std::vector<int>& ranks) {
  return ranks_text(ranks) + (ranks.size() == 1 ? " has" : " have");
}

void broken(std::string_view text, Place place) {
  std::fprintf(stderr, "weft: broken invariant: %.*s (%s:%d)\n", static_cast<int>(text.size()),
               text.data(), place.file, place.line);
  std::abort();
}

}  // namespace weft
