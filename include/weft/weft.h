// All of Weft.
#pragma once

#include <weft/error.h>
#include <weft/future.h>
#include <weft/group.h>
#include <weft/parallel.h>
