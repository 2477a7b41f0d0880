# Writes dashboard.html as a C++ array: cmake -DIN=dashboard.html -DOUT=dashboard.cpp -P embed.cmake

file(READ ${IN} bytes HEX)
string(LENGTH "${bytes}" size)
math(EXPR size "${size} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}") # lines of 16
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "'\\\\x\\1'," bytes "${bytes}")
file(WRITE ${OUT} "#include \"hobbit-dashboard.h\"\n\nconst char hobbit_dashboard_html[] = {\n${bytes}\n};\nconst size_t hobbit_dashboard_html_size = ${size};\n")
