#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <typeinfo>
#include <utility>

#include <cxxabi.h>

#include <weft/base/error.h>

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
  return std::string(text.substr(0, kMostText)) + "… (the first " + std::to_string(kMostText) + " of " +
         std::to_string(text.size()) + " bytes)";
}

std::string type_of(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> spelled(abi::__cxa_demangle(type.name(), nullptr, nullptr, &status),
                                                            &std::free);
  return status == 0 ? spelled.get() : type.name();
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

Error Error::within(const std::string& context) const { return {blame_, context + ": " + text_, native_code_, place_}; }

Error system_error(Blame blame, const std::string& text, int number, Place place) {
  char buffer[256];
  return {blame, text + ": " + strerror_r(number, buffer, sizeof buffer), number, place};
}

Error to_error(const std::exception_ptr& caught, Blame otherwise) {
  try {
    std::rethrow_exception(caught);
  } catch (const Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {otherwise, "this process could get no more memory (std::bad_alloc)"};
  } catch (...) {
    return {otherwise, text_of(caught)};
  }
}

std::string text_of(const std::exception_ptr& caught) {
  std::string text;
  std::exception_ptr next = caught;
  for (int depth = 0; next && depth < kMostNested; ++depth) {
    if (depth > 0) text += ", caused by: ";
    const std::exception_ptr now = std::exchange(next, nullptr);
    try {
      std::rethrow_exception(now);
    } catch (const std::exception& error) {
      const char* const what = error.what();
      text += what != nullptr ? cut(what) : type_of(typeid(error)) + ", whose what() is null";
      const auto* const nested = dynamic_cast<const std::nested_exception*>(&error);
      if (nested != nullptr) next = nested->nested_ptr();
    } catch (const std::string& thrown) {
      text += cut(thrown);
    } catch (const char* thrown) {
      text += thrown != nullptr ? cut(thrown) : "a null char*";
    } catch (...) {
      text += "something that is no std::exception, but " + type_of(*abi::__cxa_current_exception_type());
    }
  }
  return text;
}

void broken(std::string_view text, Place place) {
  std::fprintf(stderr, "weft: broken invariant: %.*s (%s:%d)\n", static_cast<int>(text.size()), text.data(), place.file,
               place.line);
  std::abort();
}

}  // namespace weft
