// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include <unwind.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef WEFT_HAVE_BACKTRACE
#define HAVE_DECL_BASENAME 1  // without this, libiberty declares basename() as C
#include <backtrace.h>
#include <libiberty/demangle.h>
#endif

#include <weft/base/descriptor.h>
#include <weft/base/stack_trace.h>

namespace weft::crash {

namespace {

// The contents of /proc/self/maps when the object was made.
class Modules {
 public:
  Modules() noexcept {
    const Descriptor file(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
    void* const memory = ::mmap(nullptr, kMostBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!file || memory == MAP_FAILED) return;
    auto* const text = static_cast<char*>(memory);
    std::size_t bytes = 0;
    while (bytes < kMostBytes) {
      const auto count = ::read(file.get(), text + bytes, kMostBytes - bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) break;
      bytes += static_cast<std::size_t>(count);
    }
    text_ = {text, bytes};
  }
  ~Modules() {
    if (text_.data() != nullptr) ::munmap(const_cast<char*>(text_.data()), kMostBytes);
  }
  Modules(const Modules&) = delete;
  Modules& operator=(const Modules&) = delete;

  struct ModuleOffset {
    std::string_view file;  // "" where nothing is mapped
    std::uintptr_t offset = 0;
  };
  ModuleOffset find(std::uintptr_t address) const noexcept {
    std::string_view first_file;
    std::uintptr_t base = 0;
    for (std::string_view rest = text_; !rest.empty();) {
      const std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(rest.size(), line.size() + 1));
      std::uintptr_t begin = 0;
      std::uintptr_t end = 0;
      const char* const last = line.data() + line.size();
      const auto [dash, wrong] = std::from_chars(line.data(), last, begin, 16);
      if (wrong != std::errc() || dash == last) continue;
      std::from_chars(dash + 1, last, end, 16);
      const auto slash = line.find('/');
      const std::string_view file = slash == std::string_view::npos ? "" : line.substr(slash);
      // A module's mappings follow each other; the first begins at its base.
      if (file != first_file) {
        first_file = file;
        base = begin;
      }
      if (begin <= address && address < end) return {file.empty() ? "?" : file, address - base};
    }
    return {};
  }

 private:
  static constexpr std::size_t kMostBytes = 8 << 20;
  std::string_view text_;
};

std::string_view name_of_file(std::string_view path) { return path.substr(path.rfind('/') + 1); }

void write_place(Text& text, const Modules& modules, std::uintptr_t address) noexcept {
  const auto place = modules.find(address);
  if (place.file.empty()) {
    text.hex(address) << " (nothing is mapped there)";
  } else {
    text << name_of_file(place.file) << "+";
    text.hex(place.offset);
  }
}

#ifdef WEFT_HAVE_BACKTRACE

// In bytes: the demangler uses 70 bytes of stack for each byte of a name.
constexpr std::size_t kLongestName = 4096;

void write_name(Text& text, const char* name) noexcept {
  const auto append = [](const char* part, std::size_t bytes, void* to) {
    *static_cast<Text*>(to) << std::string_view(part, bytes);
  };
  const bool is_demangled =
      std::strlen(name) <= kLongestName && std::strncmp(name, "_Z", 2) == 0 &&
      cplus_demangle_v3_callback(name, DMGL_PARAMS | DMGL_ANSI, append, &text) != 0;
  if (!is_demangled) text << name;
}

// One address. Where functions are inlined it stands for several frames.
struct Symbol {
  Text& text;
  int& number;
  const Modules& modules;
  std::uintptr_t address = 0;
  bool is_named = false;
  const char* file = nullptr;  // may be known where the function is not
  int line = 0;

  void write(const char* function) noexcept {
    is_named = true;
    text << "  #" << number++ << " ";
    write_name(text, function);
    if (file != nullptr) text << " at " << file << ":" << line;
    text << " (";
    write_place(text, modules, address);
    text << ")\n";
    text.flush();  // the next frame's data may be damaged
  }
};

void ignore_error(void*, const char*, int) {}

bool write_symbol(backtrace_state* state, Symbol& symbol) noexcept {
  const auto from_lines = [](void* to, std::uintptr_t, const char* file, int line,
                             const char* function) {
    auto& found = *static_cast<Symbol*>(to);
    found.file = file;
    found.line = line;
    if (function != nullptr) found.write(function);
    return 0;
  };
  const auto from_symbols = [](void* to, std::uintptr_t, const char* function, std::uintptr_t,
                               std::uintptr_t) {
    if (function != nullptr) static_cast<Symbol*>(to)->write(function);
  };
  backtrace_pcinfo(state, symbol.address, from_lines, ignore_error, &symbol);
  if (!symbol.is_named)
    backtrace_syminfo(state, symbol.address, from_symbols, ignore_error, &symbol);
  return symbol.is_named;
}

#endif

}  // namespace

Text& Text::operator<<(std::string_view text) noexcept {
  while (!text.empty()) {
    if (used_ == buffer_.size()) flush();
    const std::size_t count = std::min(text.size(), buffer_.size() - used_);
    std::memcpy(buffer_.data() + used_, text.data(), count);
    used_ += count;
    text.remove_prefix(count);
  }
  return *this;
}

Text& Text::operator<<(std::int64_t number) noexcept {
  std::array<char, 24> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return *this << std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data()));
}

Text& Text::hex(std::uintptr_t number) noexcept {
  std::array<char, 24> digits{'0', 'x'};
  const auto end = std::to_chars(digits.data() + 2, digits.data() + digits.size(), number, 16).ptr;
  return *this << std::string_view(digits.data(), static_cast<std::size_t>(end - digits.data()));
}

void Text::flush() noexcept {
  for (std::size_t done = 0; done < used_;) {
    const auto count = ::write(descriptor_, buffer_.data() + done, used_ - done);
    if (count > 0) {
      done += static_cast<std::size_t>(count);
    } else if (errno == EAGAIN) {
      pollfd writable{descriptor_, POLLOUT, 0};
      ::poll(&writable, 1, -1);
    } else if (errno != EINTR) {
      break;
    }
  }
  used_ = 0;
}

Stack::Stack() noexcept {
  _Unwind_Backtrace(
      [](_Unwind_Context* frame, void* to) {
        auto& stack = *static_cast<Stack*>(to);
        int is_exact = 0;
        const std::uintptr_t address = _Unwind_GetIPInfo(frame, &is_exact);
        if (stack.count_ == stack.frames_.size() || address == 0) return _URC_END_OF_STACK;
        // A return address may lie in the next function; the call is just before it.
        stack.frames_[stack.count_++] = is_exact != 0 ? address : address - 1;
        return _URC_NO_REASON;
      },
      this);
}

Stack::Stack(std::uintptr_t address, std::uintptr_t caller) noexcept
    : frames_{address, caller - 1}, count_(2) {}

bool Stack::begin_at(std::uintptr_t address) noexcept {
  const auto end = frames_.begin() + count_;
  const auto found = std::find(frames_.begin(), end, address);
  if (found == end) return false;
  first_ = static_cast<std::size_t>(found - frames_.begin());
  return true;
}

void write_stack(Text& text, const Stack& stack, Names names) noexcept {
  const Modules modules;
  int number = 0;
#ifdef WEFT_HAVE_BACKTRACE
  backtrace_state* const state =
      names == Names::Functions
          ? backtrace_create_state(nullptr, /*threaded=*/0, ignore_error, nullptr)
          : nullptr;
#else
  static_cast<void>(names);
#endif
  for (const std::uintptr_t address : stack.frames()) {
#ifdef WEFT_HAVE_BACKTRACE
    Symbol symbol{text, number, modules, address};
    if (state != nullptr && write_symbol(state, symbol)) continue;
#endif
    text << "  #" << number++ << " ";
    write_place(text, modules, address);
    text << "\n";
  }
  if (stack.is_cut()) text << "  (more frames follow)\n";
}

}  // namespace weft::crash
