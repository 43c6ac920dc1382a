// WEFT_API marks what libweft.so exports: what users call, and what the templates and inline
// functions of public headers call. Every other symbol of Weft is hidden (cmake/libweft.map). A
// class whose objects are thrown has the mark too.
#pragma once

#define WEFT_API [[gnu::visibility("default")]]
