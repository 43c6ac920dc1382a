#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

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
  } catch (const std::exception& error) {
    return {otherwise, error.what()};
  } catch (...) {
    return {otherwise, "an exception that is no std::exception"};
  }
}

void broken(std::string_view text, Place place) {
  std::fprintf(stderr, "weft: broken invariant: %.*s (%s:%d)\n", static_cast<int>(text.size()), text.data(), place.file,
               place.line);
  std::abort();
}

}  // namespace weft
