// The torch wheel ships Gloo's code inside libtorch_cpu but not its headers. These six files
// declare what c10d/ProcessGroupGloo.hpp names, and no more: opaque types, and the interfaces it
// derives from or calls. They hold no data members; nothing of Gloo is constructed, laid out or
// derived from in our own translation units.
#pragma once
