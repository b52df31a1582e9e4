from koinon_command import main

main()
